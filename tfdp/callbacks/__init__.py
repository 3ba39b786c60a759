"""Callbacks for `model.fit`: each switches one thing on, or observes."""

from tfdp.callbacks.backup_and_restore import BackupAndRestore
from tfdp.callbacks.communication_monitor import CommunicationMonitor
from tfdp.callbacks.consistency_check import ConsistencyCheck
from tfdp.callbacks.gradient_accumulation import GradientAccumulation
from tfdp.callbacks.gradient_noise_scale import GradientNoiseScale
from tfdp.callbacks.learning_rate_warmup import LearningRateWarmup
from tfdp.callbacks.loss_scaling import LossScaling
from tfdp.callbacks.sharded_optimizer import ShardedOptimizer
from tfdp.callbacks.timeline import Timeline

__all__ = [
    "BackupAndRestore",
    "CommunicationMonitor",
    "ConsistencyCheck",
    "GradientAccumulation",
    "GradientNoiseScale",
    "LearningRateWarmup",
    "LossScaling",
    "ShardedOptimizer",
    "Timeline",
]
