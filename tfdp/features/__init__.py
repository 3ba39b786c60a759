"""What can be added to training: each feature registers itself, the core knows none.

How one is added: `tfdp.ground.base.feature`, and "Add a feature" in CONTRIBUTING.md.

- `built_in`: imports the features of this package, in their order.
- `ray`: Ray Train, a trainer, a callback and shards of Ray Data.
- `tuning`: a plan of buckets found by trial in the first steps of `fit`.
- `islands`: workers that are jobs of their own, and the hub where they meet.
- `local_steps`: updates alone, and the exchange of what was learned.
- `monitor`: step times and traces, gathered and written.
- `tracking`: Weights & Biases and MLflow, from the first worker.
"""
