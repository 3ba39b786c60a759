"""The command line, and the launchers that start workers, without TensorFlow.

- `cli`: the commands `tfdp run`, `doctor`, `plan`, `bench`, `convert`.
- `rendezvous`: how the launchers of several machines start a job together.
- `bench`: benchmarks of collectives and training steps.
"""
