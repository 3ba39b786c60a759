"""Steps that two replicas compute, so that silent corruption is found.

- `checked_step`: digests of what replicas compute, compared before the update.
- `ranked_group`: replicas that compute the parts of others, with sums in a fixed order.
- `suspects`: which replicas have computed wrongly.
- `training`: the steps of `fit` that are replayed, made again, or end it.
"""
