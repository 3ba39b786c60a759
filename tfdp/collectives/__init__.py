"""Process groups and the collectives that run on them."""

from tfdp.collectives.algorithms import (
    FLAT,
    Level,
    halving_doubling,
    hierarchical,
    ring,
    tree,
)
from tfdp.collectives.groups import LaunchOrder, ProcessGroup, positions_of
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
    "FLAT",
    "LaunchOrder",
    "Level",
    "ProcessGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "halving_doubling",
    "hierarchical",
    "padded_length",
    "positions_of",
    "reduce_scatter",
    "ring",
    "tree",
]
