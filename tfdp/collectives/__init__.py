"""Process groups and the collectives that run on them."""

from tfdp.collectives.groups import LaunchOrder, ProcessGroup
from tfdp.collectives.primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    padded_length,
    reduce_scatter,
)

__all__ = [
    "LaunchOrder",
    "ProcessGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "padded_length",
    "reduce_scatter",
]
