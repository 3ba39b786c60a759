"""Benchmarks that `tfdp bench` runs: ratios of sides that take turns."""
