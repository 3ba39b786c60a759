"""Choice of the algorithm by which a bucket is reduced with compressors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground.links import Links
from tfdp.ground.options import (
    COMMUNICATION_DTYPES,
    CommunicationOptions,
    is_compressor,
)
from tfdp.ground.plans.buckets import Entry
from tfdp.ground.plans.cost_model import predict_seconds
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm
from tfdp.training.compression.block_quantized import BlockQuantized
from tfdp.training.compression.compressed_reduce import Wire
from tfdp.training.compression.compressor import Compressor, GradientBucket
from tfdp.training.reduction.algorithm_choice import RING, AlgorithmChoice

_LEVELS = Algorithm("hierarchical")


@dataclasses.dataclass(frozen=True)
class LevelCompressors:
    """What travels inside nodes and across them, where a level has a compressor.

    Args:
        inner: `Compressor` inside nodes, name of a dtype, or `None`.
        outer: The same across nodes.
    """

    inner: Any
    outer: Any

    @classmethod
    def of(
        cls, options: CommunicationOptions, topology: Topology
    ) -> LevelCompressors | None:
        """Return those of some options on a cluster, or `None` for no compressor."""
        inner, outer = (_named(given) for given in options.compression_levels)
        # Where there is one level only, the other's does not matter.
        if topology.num_nodes == 1:
            outer = inner
        elif topology.replicas_per_node == 1:
            inner = outer
        has_any = is_compressor(inner) or is_compressor(outer)
        return cls(inner, outer) if has_any else None

    @property
    def is_uniform(self) -> bool:
        """Bool, whether both levels have the same."""
        return self.inner == self.outer

    @property
    def are_both_compressed(self) -> bool:
        """Bool, whether a hierarchical reduction sends as little as each level says."""
        return not self.is_uniform or self.inner.compresses_gathers

    @property
    def cuts_buckets(self) -> bool:
        """Bool, whether every compressor takes parts of buckets."""
        given = [c for c in (self.inner, self.outer) if is_compressor(c)]
        return all(compressor.cuts_buckets for compressor in given)


def best_choice(
    levels: LevelCompressors,
    candidates: Sequence[Algorithm],
    contents: tuple[int, str, tuple[Entry, ...]],
    topology: Topology,
    links: Links,
) -> AlgorithmChoice | None:
    """Choose the fastest way to reduce a bucket with compressors.

    Args:
        levels: `LevelCompressors`.
        candidates: Sequence of `Algorithm`, in the order of preference.
        contents: Tuple of the bucket's size in bytes, its dtype and its entries.
        topology: `Topology`.
        links: `Links`.

    Returns:
        `AlgorithmChoice`, or `None` where no algorithm can carry it.
    """
    choices = [
        _choice(levels, algorithm, contents, topology, links)
        for algorithm in _carriers(levels, candidates, topology)
    ]
    return min(choices, key=lambda choice: choice.seconds, default=None)


def _carriers(
    levels: LevelCompressors, candidates: Sequence[Algorithm], topology: Topology
) -> Iterator[Algorithm]:
    """The algorithms by which compressors can reduce."""
    found: dict[Algorithm, None] = {}
    for algorithm in candidates:
        is_hierarchical = algorithm.has_levels and topology.has_levels
        if levels.is_uniform and not levels.cuts_buckets:
            found[algorithm] = None  # what is summed are factors and the like
        elif is_hierarchical and levels.are_both_compressed:
            found[_LEVELS] = None
        elif levels.is_uniform:
            found[RING] = None
    yield from found


def _choice(
    levels: LevelCompressors,
    algorithm: Algorithm,
    contents: tuple[int, str, tuple[Entry, ...]],
    topology: Topology,
    links: Links,
) -> AlgorithmChoice:
    num_bytes, dtype, entries = contents
    itemsize = tf.as_dtype(dtype).size
    whole = GradientBucket(num_bytes // itemsize, dtype, topology.num_replicas, entries)
    inside = across = whole
    if algorithm.has_levels and not levels.is_uniform:
        across = dataclasses.replace(whole, num_replicas=topology.num_nodes)
    if algorithm.has_levels and levels.cuts_buckets:
        node_size = topology.replicas_per_node
        inside = dataclasses.replace(whole, num_replicas=node_size, entries=())
        across = dataclasses.replace(
            inside,
            size=-(-whole.size // node_size),
            num_replicas=topology.num_nodes,
        )
    choice = AlgorithmChoice(
        algorithm, _wire(levels.inner, inside), _wire(levels.outer, across)
    )
    seconds = predict_seconds(
        algorithm,
        num_bytes,
        topology,
        links,
        inner_ratio=choice.inner.byte_ratio(itemsize),
        outer_ratio=choice.outer.byte_ratio(itemsize),
    )
    return dataclasses.replace(choice, seconds=seconds)


def _wire(given: Any, bucket: GradientBucket) -> Wire:
    """What travels of a bucket by a compressor, a dtype, or as it is."""
    if not is_compressor(given):
        return Wire(dtype_name=given)
    ratio = given.wire_ratio(bucket)
    return Wire(given, ratio=math.nan if ratio is None else ratio)


def _named(given: Any) -> Compressor | str | None:
    """A compressor, or the name of the dtype, that an option stands for."""
    if given == "int8":
        return BlockQuantized()
    return COMMUNICATION_DTYPES[given] if isinstance(given, str) else given
