"""Benchmarks of `tfdp bench`: paired ratios of sides that take turns on one machine.

The engine, in the order in which to read it, which `tools/bench` uses too:

- `sides`: the driver. A `Side` is a group of worker processes; `alternate` gives all
  sides their turns, block by block; paired ratios with their intervals.
- `channel`: the worker's end of the pipe, and what it times.
- `replicas`: local workers, or the cluster of this process, and what it can run.
- `machine`, `output`: what it ran on; one report of table, JSON and plot for all.

What is measured: `models` (sizes), `fit` (the same built by Keras, and timed steps of
its `fit`), `training` (the worker that trains), `torch_worker` (its rival, which needs
no TensorFlow).

The benchmarks: `collectives` (with `collectives_worker` and `nccl_tests`) and `compare`
(with `compare_sides`, its set-ups).
"""
