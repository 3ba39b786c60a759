"""Monitor of communication: steps are measured, merged over workers, and reported.

Files, in the order of the data flow:

- `meter`: timing of a worker's steps by time stamps in the graph; `device_meter` does
  it on GPUs, by profiles, and chooses between the two.
- `time_intervals`: what intervals of time cover.
- `readings`: times of a step, computed from the recorded values.
- `windows`: means over several steps, of a worker and of all workers, and detection of
  stragglers.
- `advice`: recommendation of the most useful change.
- `input_wait`: wait for data on each worker, for `tfdp doctor --input`.
- `report`: the thread that merges the windows of all workers, and the files of a run,
  which `sinks` writes.
- `gradient_noise`: the noise scale of gradients, from norms of a step.
- `trace`: steps as a timeline for Chrome and Perfetto.
- `flight_collectives`: collectives in the flight records of all workers, which one was
  not entered by all; `flight_records` says in words who was where.
"""
