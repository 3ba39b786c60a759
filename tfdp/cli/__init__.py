"""The command line: `tfdp run` and `tfdp doctor`."""
