"""Benchmarks of `tfdp bench`: paired ratios of sides that alternate on one machine.

A side is a group of worker processes, which run one or several measured variants
(`Variant`). A block is a number of steps of a variant, without interruption.

The engine, in reading order, which `tools/bench` uses too:

- `sides`: the driver. A `Side` starts worker processes; `alternate` runs the variants
  of all sides block by block; `Ratio` is a paired ratio with its interval.
- `channel`: the worker's end of the pipe to the driver, and its timer.
- `replicas`: local workers, or the cluster of this process, and the checks of both.
- `machine`, `output`: the machine and versions; the report as table, JSON and plot.

The measured programs: `models` (sizes), `fit` (the models built by Keras, and timed
steps of `fit`), `training` (the worker that trains), `torch_worker` (the worker of
PyTorch's DDP, which needs no TensorFlow).

The benchmarks: `collectives` (with `collectives_worker` and `nccl_tests`) and `compare`
(with `compare_sides`, its set-ups).
"""
