"""Experiment trackers under several workers: the first worker alone logs.

A script for one process that calls Weights & Biases or MLflow would make a run on each
worker. Reading order:
    first_worker: whether this process logs, before and after a strategy is made
    weights_and_biases, mlflow_store: what the other workers do instead
    watch: both, once these packages are imported
"""
