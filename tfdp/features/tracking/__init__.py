"""Experiment trackers under several workers: the first worker alone logs.

A script for one process that calls Weights & Biases or MLflow would make a run on each
worker. `watch`: whether this process logs, known before a strategy is made, and what
the other workers do instead, once these packages are imported.
"""
