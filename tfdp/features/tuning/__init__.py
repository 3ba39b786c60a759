"""Automatic tuning: a long `fit` looks for the plan of its step that is the fastest.

    default block -> proposals -> rounds of paired blocks, halved -> the winner, kept

- `plan_cache`: what may be chosen, bucket sizes and algorithm; and winners on disk, for
  the next run.
- `proposals`: the plans that are worth a trial, by the cost model.
- `tuner`: a trial over the steps of a loop, block by block: successive halving, to a
  winner with an interval.
- `callback`: all of it in `fit`, and what a `fit` has to be like for a trial.
- `rebalancing`: rows of a batch by the measured speed of the workers.
"""
