"""Callbacks for `model.fit`: each enables one feature or observes training.

- `bases`: base classes of callbacks that change training, which wrap the model's
  optimizer in a `DistributedOptimizer`, and of callbacks that time steps.
- `gradient_accumulation`, `loss_scaling`, `sharded_optimizer`, `learning_rate_warmup`,
  `gradient_noise_scale`: one feature of the `DistributedOptimizer` each.
- `spike_guard`: updates left out where the loss or the gradient spikes.
- `local_sgd`, `diloco`: training in which replicas or nodes update independently.
- `backup_and_restore`: backups, and the resumption of a run on any number of replicas;
  `run_state`: what a backup contains; `resumption`: `fit` continues from a backup;
  `resumed_batches`: batches of another size.
- `communication_monitor`, `timeline`: measurements of steps.
- `input_probe`: how long the `fit` of a script waits for data, for `tfdp doctor`.
- `consistency_check`: a comparison of checksums of all replicas' weights.
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
from tfdp.callbacks.spike_guard import SpikeGuard
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
    "SpikeGuard",
    "Timeline",
]
