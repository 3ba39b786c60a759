"""Optional features of training: each registers itself, and the core imports none.

To add one, see `tfdp.ground.base.feature` and "Add a feature" in CONTRIBUTING.md.

- `built_in`: imports of the features of this package, in the order of their hooks.
- `ray`: a trainer, a callback and dataset shards for Ray Train.
- `tuning`: bucket plans tuned by trial in the first steps of `fit`.
- `islands`: workers that are separate jobs, and the hub through which they exchange.
- `elastic_state`: training loops of the user's own that continue in the same way.
- `elastic`: training that continues after the loss of workers, and takes in others.
- `backup_workers`: steps that drop the gradients of late workers.
- `micro_batches`: a batch computed in as many parts as its memory needs.
- `drift_probe`: checksums of each replica's weights, in steps of `fit`.
- `replay`: steps that two replicas compute, compared before the update.
- `spikes`: updates that are left out since the loss or the gradient spikes.
- `attempts`: further attempts of a call of `fit`, from the newest backup.
- `local_steps`: local updates of replicas or nodes, and periodic exchanges.
- `goodput`: a ledger of a job's time, over all of its restarts.
- `monitor`: step times and traces, gathered and written.
- `warmup`: a learning rate that rises during the first updates.
- `tracking`: logging to Weights & Biases and MLflow from the first worker only.
"""
