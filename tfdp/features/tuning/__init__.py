"""Automatic tuning: a long `fit` looks for the plan of its step that is the fastest.

    default block -> proposals -> rounds of paired blocks, halved -> the winner, kept

- `plan_choice`: what may be chosen: bucket sizes and algorithm.
- `proposals`: the plans that are worth a trial, by the cost model.
- `trial`: successive halving, from the times of blocks to a winner with an interval.
- `tuner`: a trial over the steps of a loop, block by block.
- `plan_cache`: winners on disk, for the next run.
- `conditions`: what a `fit` has to be like for a trial.
- `callback`: all of it in `fit`.
- `rebalancing`: rows of a batch by the measured speed of the workers.
"""
