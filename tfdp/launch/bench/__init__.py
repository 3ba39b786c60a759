"""Benchmarks of `tfdp bench`: paired ratios of sides that take turns on one machine.

The engine, in the order in which to read it, which `tools/bench` uses too:

- `sides`: the driver. A `Side` is a group of worker processes; `alternate` gives all
  sides their turns, block by block.
- `channel`: the worker's end of the pipe.
- `stats`: paired ratios with their intervals.
- `machine`, `output`: what it ran on; table, JSON and plot.

What is measured: `models` (sizes), `keras_models` (built by Keras), `fit` (timed steps
of Keras `fit`), `training` (the worker that trains), `torch_worker` (its rival, which
needs no TensorFlow). Beside it: `local_replicas` (which are on one node).

The benchmarks: `collectives` (with `collectives_worker` and `nccl_tests`) and `compare`
(with `compare_sides`, its set-ups); their tables and plots are in `collectives_report`
and `compare_report`.
"""
