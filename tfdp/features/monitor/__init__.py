"""Monitor of communication: steps measured, merged over workers, and reported.

Read in the order of the data:

- `meter`: times every step of a worker and reads what the step noted; `device_meter`
  does it on GPUs, by profiles, and chooses between the two.
- `readings`: the times of a step, computed from what was read.
- `windows`: means over several steps, of a worker and of all workers, and which worker
  the others wait for.
- `advice`: what to change first.
- `input_wait`: waiting for data, by worker, for `tfdp doctor --input`.
- `report`: the thread that brings the windows of all workers together, and the files
  of a run, which `sinks` writes.
- `gradient_noise`: the noise scale of gradients, from norms of a step.
- `trace`: steps as a timeline for Chrome and Perfetto.
"""
