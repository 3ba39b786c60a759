"""The command line: `tfdp run`, `doctor`, `plan`, `goodput`, `bench`, `convert`.

`main` has the group of commands, each in a file of its name; `parameter_types` has
options and their types; `errors` reports errors in one sentence, also those of the late
import of TensorFlow. `run` checks a `program` and starts a `job` of local workers:
`launch` (settings, and the environment of a worker), `start` (workers as processes, or
as forks of a process that has imported TensorFlow, see `import_once`), `worker` (a
process, its output and its log), `output` (what of it is shown) with `noise` and
`tracebacks` (lines that are left out, or shown once), `screen` (the output of all
workers as text or JSON, with `lines` as on a terminal) on a `nonblocking_stream` (which
never blocks), `signals`, and `attempts` (the loop over restarts of a job).
For several machines, `node_options` has the options; the launcher of a node has a
`coordinator_connection` to node 0, at a rendezvous (tfdp/launch/rendezvous). By ssh
(`hosts`, `ssh`), an `ssh_job` starts such launchers as `ssh_worker`s; `remote` is the
program on the host, and `remote_line` the lines between the two. `islands` starts a job
of islands, and has their options; `elastic` a job that continues without lost workers;
both are `separate_workers`. `elastic_nodes` is the part of a node in an elastic job on
several machines.
`doctor` draws a `topology_tree`; its `--input` runs a script in a local job, by
`doctor_input`, in which each worker is an `input_worker`; with folders it merges the
flight records of workers, by `doctor_records`. `plan` prints a `forecast`; `goodput`
shows a job's ledger of time.
"""
