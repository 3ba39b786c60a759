"""Tests of `tfdp.training.program`."""
