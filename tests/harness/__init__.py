"""Runs the same case on one device and on every distributed set-up.

Reading order: `setups` (what is compared), `registry` (what a case is), `env`
(what a case is given), `strategies` (the one place that makes a strategy),
`worker` (the process that runs cases), `ranks` (workers that MPI starts),
`cluster` (starts, watches and kills workers), `lane` (the queue of one set-up),
`pool` (all set-ups of a test session), `compare` (the error measure), `iterators`
(deletes those of plain Keras without a wait).
"""
