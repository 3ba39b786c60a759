"""The command line: `tfdp run`, `doctor`, `plan`, `bench` and `convert`."""
