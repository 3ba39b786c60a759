"""Callbacks for `model.fit`: each switches one feature on, or observes.

- `optimizer_callback`: base of those that change training; it turns the model's
  optimizer into a `DistributedOptimizer`, once.
- `gradient_accumulation`, `loss_scaling`, `sharded_optimizer`, `learning_rate_warmup`,
  `gradient_noise_scale`: one feature of that optimizer each.
- `local_steps`: base of those that let replicas step alone: `local_sgd`, `diloco`.
- `backup_and_restore`, with `resumed_batches` and `learning_rates`: backups, and the
  resumption of a run on any number of replicas.
- `measuring_callback`: base of those that time steps: `communication_monitor`,
  `timeline`.
- `input_probe`: how long the `fit` of a script waits for data, for `tfdp doctor`.
- `consistency_check`: a checksum of all replicas' weights.
"""

from tfdp.callbacks.backup_and_restore import BackupAndRestore
from tfdp.callbacks.communication_monitor import CommunicationMonitor
from tfdp.callbacks.consistency_check import ConsistencyCheck
from tfdp.callbacks.diloco import DiLoCo
from tfdp.callbacks.gradient_accumulation import GradientAccumulation
from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdp.callbacks.local_sgd import LocalSGD
from tfdp.callbacks.loss_scaling import LossScaling
from tfdp.callbacks.sharded_optimizer import ShardedOptimizer
from tfdp.callbacks.timeline import Timeline

__all__ = [
    "BackupAndRestore",
    "CommunicationMonitor",
    "ConsistencyCheck",
    "DiLoCo",
    "GradientAccumulation",
    "GradientNoiseScale",
    "LearningRateWarmup",
    "LocalSGD",
    "LossScaling",
    "ShardedOptimizer",
    "Timeline",
]
