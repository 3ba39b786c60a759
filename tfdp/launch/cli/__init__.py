"""The command line: `tfdp run`, `doctor`, `plan`, `bench` and `convert`.

`main` has the commands, each in a file of its name; `parameter_types` their options and
the types of these; `errors` what goes wrong, in a sentence, also while TensorFlow is
imported, late. `run` checks a `program` and starts a `job` of local
workers: `launch` (settings, and the environment of each), `start` (each by itself, or
forked from a process that imports TensorFlow, see `import_once`), `worker` (a process,
its output and its log), `noise` and `tracebacks` (lines that are not shown, or
once), `screen` and `json_screen` (the output of all, whose `lines` are as on a
terminal) on an `outlet` (which never blocks), `signals`, and `attempts` (the one loop
over jobs that are started again).
On several machines `node_options` say where; the launcher of a node joins the
`other_nodes` at a rendezvous (tfdp/launch/rendezvous). By ssh (`hosts`, `ssh`) an
`ssh_job` starts such launchers as `ssh_worker`s, whose other end is `remote`;
`remote_line` is what goes through the connection. `run_islands` starts a job of
islands, whose options are `island_options`.
`doctor` draws a `topology_tree`; its `--input` runs a script in such a job, by
`doctor_input`, where each worker is an `input_worker`. `plan` prints a `forecast`;
`bench` has options of its own in `bench_options`.
"""
