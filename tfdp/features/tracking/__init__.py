"""Experiment trackers with several workers: only the first worker logs.

A script for one process that calls Weights & Biases or MLflow would create a run on
each worker. `watch`: decides whether this process logs, before a strategy is created,
and disables these packages on the other workers when they are imported.
"""
