"""The command line, and the launchers that start workers, without TensorFlow.

- `cli`: the commands `tfdp run`, `doctor`, `plan`, `bench`, `convert`.
- `rendezvous`: launchers of several machines, which start together.
- `bench`: benchmarks of collectives and training steps.
"""
