"""The command line: `tfdp run`, `tfdp doctor` and `tfdp plan`."""
