"""Tests of `tfdp.program`."""
