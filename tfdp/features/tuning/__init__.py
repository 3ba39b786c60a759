"""Automatic tuning: a long `fit` finds the fastest communication plan of its step.

    default block -> proposals -> rounds of blocks, successive halving -> stored winner

- `plan_cache`: choices of a plan, bucket sizes and algorithm; and a cache of winners on
  disk, for the next run.
- `proposals`: plans that are worth a trial, ranked by the cost model.
- `tuner`: trial of proposals over the steps of a loop, by successive halving, with an
  interval of the winner's gain.
- `callback`: the callback that tunes during `fit`, and the requirements of a trial.
- `rebalancing`: rows of a batch divided by the measured speed of the workers.
"""
