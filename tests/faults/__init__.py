"""Jobs of real worker processes in which something goes wrong on purpose."""
