"""The command line: `tfdp run`, `doctor`, `plan`, `bench` and `convert`.

`main` has the commands, each in a file of its name; `parameter_types` the types of
their options. `run` checks a `program` and, by `run_where`, starts a `job` of local
workers: `launch` (settings, and the environment of each), `start` (each by itself, or
forked from a process that imports TensorFlow, see `import_once`), `worker` (a process
and its output), `log_file`, `noise` and `tracebacks` (lines that are not shown, or
once), `screen` (the output of all; `json_screen`: as JSON) on an `outlet` (which never
blocks), `signals`, and `attempts` (the one loop over jobs that are started again).
On several machines `node_options` say where; the launcher of a `node` takes part in a
rendezvous (tfdp/launch/rendezvous) by `node_attempts`, and hears the `other_nodes`. By
ssh (`hosts`, `ssh`) an `ssh_job` starts such launchers as `ssh_worker`s, whose other
end is `remote`; `remote_line` is what goes through the connection.
`run_islands` starts an `island_job`, whose options are `island_options`.
`doctor` draws a `topology_tree`; its `--input` runs a script in such a job, by
`doctor_input`, where each worker is an `input_worker`. `plan` prints a `forecast` with
its `memory`; `bench` has options of its own in `bench_options`. TensorFlow is imported
late, by `importing`.
"""
