"""Steps that two replicas compute, so that silent corruption is found.

- `checked_step`: digests of what replicas compute, compared before the update.
- `replay_group`: replicas that compute the parts of others, with sums in a fixed order.
- `suspects`: which replicas have computed wrongly.
- `training`: the steps of `fit` that two replicas compute, and what follows if bits
  differ: the step is repeated, and if they differ again, `fit` ends.
"""
