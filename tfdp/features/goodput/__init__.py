"""Goodput: a ledger of how a job spends its time, over all of its restarts.

Worker 0 appends to a file while it trains; the file is read for one line at the end of
`tfdp run`, for `tfdp goodput` and for TensorBoard. The first two files import no
TensorFlow, so that the launcher can use them.

- `ledger`: the file, where it is, and how lines are appended and read.
- `account`: shares of a job's time, computed from the lines.
- `recorder`: classes of this worker's time, by the events of `fit`.
- `training`: the feature of `fit`, which connects the two.
"""
