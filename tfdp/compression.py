"""Compressed reduction of gradients: fewer bytes sent, with error feedback."""

from tfdp.training.compression.block_quantized import BlockQuantized
from tfdp.training.compression.compressor import Compressor, GradientBucket
from tfdp.training.compression.power_sgd import PowerSGD
from tfdp.training.compression.replica_group import ReplicaGroup
from tfdp.training.compression.top_k import TopK

__all__ = [
    "BlockQuantized",
    "Compressor",
    "GradientBucket",
    "PowerSGD",
    "ReplicaGroup",
    "TopK",
]
