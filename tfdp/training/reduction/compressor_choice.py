"""Choice of an algorithm that reduces a bucket with compressors."""

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
from tfdp.ground.plans.traffic import HIERARCHICAL, RING, Algorithm
from tfdp.training.compression.algorithm_choice import AlgorithmChoice, WireFormat
from tfdp.training.compression.block_quantized import BlockQuantized
from tfdp.training.compression.compressor import Compressor, GradientBucket


@dataclasses.dataclass(frozen=True)
class LevelFormats:
    """Wire formats inside and across nodes.

    Args:
        inner: Format inside nodes: `Compressor`, name of the dtype to convert to, or
            `None` for uncompressed messages.
        outer: Format across nodes, of the same kinds.
    """

    inner: Any
    outer: Any

    @classmethod
    def of(cls, options: CommunicationOptions, topology: Topology) -> LevelFormats:
        """Create the formats of both levels from options.

        Args:
            options: `CommunicationOptions`.
            topology: `Topology` of the replicas.
        """
        inner, outer = (
            _format_of_option(option) for option in options.compression_levels
        )
        # On a single node nothing is sent across nodes, so `outer` is unused; with one
        # replica per node, `inner` is. The unused format is set to the used one, since
        # a flat algorithm can apply only one format.
        if topology.num_nodes == 1:
            outer = inner
        elif topology.replicas_per_node == 1:
            inner = outer
        return cls(inner, outer)

    @property
    def has_compressors(self) -> bool:
        """Bool, whether a format is a compressor, and not only a dtype."""
        return is_compressor(self.inner) or is_compressor(self.outer)

    @property
    def is_uniform(self) -> bool:
        """Bool, whether both levels have the same format."""
        return self.inner == self.outer

    @property
    def can_combine_formats(self) -> bool:
        """Bool, whether one hierarchical reduction can apply both formats.

        With different formats it can. With the same one on both levels it can only if
        the `all_gather` of the compressor compresses, too; otherwise all replicas
        reduce in one level.
        """
        return not self.is_uniform or self.inner.compresses_gathers

    @property
    def cuts_buckets(self) -> bool:
        """Bool, whether every compressor can compress parts of buckets."""
        compressors = [c for c in (self.inner, self.outer) if is_compressor(c)]
        return all(compressor.cuts_buckets for compressor in compressors)


def best_choice(
    levels: LevelFormats,
    candidates: Sequence[Algorithm],
    contents: tuple[int, str, tuple[Entry, ...]],
    topology: Topology,
    links: Links,
) -> AlgorithmChoice | None:
    """Choose the fastest algorithm that can reduce a bucket with compressors.

    Args:
        levels: `LevelFormats`, wire formats inside and across nodes.
        candidates: Sequence of `Algorithm`, in the order of preference.
        contents: Tuple of the bucket's size in bytes, its dtype and its entries.
        topology: `Topology` of the replicas.
        links: `Links`, from which times are predicted.

    Returns:
        `AlgorithmChoice`, or `None` if no candidate can apply the compressors.
    """
    choices = [
        _choice_of(levels, algorithm, contents, topology, links)
        for algorithm in _carriers(levels, candidates, topology)
    ]
    return min(choices, key=lambda choice: choice.seconds, default=None)


def _carriers(
    levels: LevelFormats, candidates: Sequence[Algorithm], topology: Topology
) -> Iterator[Algorithm]:
    """Yield the algorithms by which a bucket can be reduced with the compressors.

    If one compressor that needs whole buckets is used on both levels, all candidates
    are yielded. Otherwise each candidate is replaced: a hierarchical one by
    `HIERARCHICAL`, if that can apply both formats; any other by `RING`, if both levels
    have the same format. A candidate without a replacement is dropped, and no algorithm
    is yielded twice.

    Args:
        levels: `LevelFormats`, wire formats inside and across nodes.
        candidates: Sequence of `Algorithm`, in the order of preference.
        topology: `Topology` of the replicas.
    """
    carriers: dict[Algorithm, None] = {}
    for algorithm in candidates:
        is_hierarchical = algorithm.is_hierarchical and topology.supports_hierarchy
        if levels.is_uniform and not levels.cuts_buckets:
            # A compressor that needs whole buckets sums small tensors, for example the
            # factors of a low-rank approximation, so any algorithm can carry it.
            carriers[algorithm] = None
        elif is_hierarchical and levels.can_combine_formats:
            carriers[HIERARCHICAL] = None
        elif levels.is_uniform:
            carriers[RING] = None
    yield from carriers


def _choice_of(
    levels: LevelFormats,
    algorithm: Algorithm,
    contents: tuple[int, str, tuple[Entry, ...]],
    topology: Topology,
    links: Links,
) -> AlgorithmChoice:
    """Return the choice of an algorithm, with its wire formats and predicted time.

    Args:
        levels: `LevelFormats`, wire formats inside and across nodes.
        algorithm: `Algorithm` that can apply these formats.
        contents: Tuple of the bucket's size in bytes, its dtype and its entries.
        topology: `Topology` of the replicas.
        links: `Links`, from which the time is predicted.
    """
    num_bytes, dtype, entries = contents
    itemsize = tf.as_dtype(dtype).size
    whole = GradientBucket(num_bytes // itemsize, dtype, topology.num_replicas, entries)
    inside = across = whole
    if algorithm.is_hierarchical and levels.cuts_buckets:
        node_size = topology.replicas_per_node
        inside = dataclasses.replace(whole, num_replicas=node_size, entries=())
        across = dataclasses.replace(
            inside,
            size=-(-whole.size // node_size),
            num_replicas=topology.num_nodes,
        )
    elif algorithm.is_hierarchical and not levels.is_uniform:
        across = dataclasses.replace(whole, num_replicas=topology.num_nodes)
    choice = AlgorithmChoice(
        algorithm,
        _wire_format(levels.inner, inside),
        _wire_format(levels.outer, across),
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


def _wire_format(option: Any, bucket: GradientBucket) -> WireFormat:
    """Return the `WireFormat` of a bucket for one level.

    Args:
        option: `Compressor`, name of a dtype, or `None` for no compression.
        bucket: `GradientBucket`, for which a compressor's ratio is computed.
    """
    if not is_compressor(option):
        return WireFormat(dtype_name=option)
    ratio = option.wire_ratio(bucket)
    return WireFormat(option, ratio=math.nan if ratio is None else ratio)


def _format_of_option(option: Any) -> Compressor | str | None:
    """Convert an option, such as `"fp16"`, to a compressor or the name of a dtype.

    Args:
        option: `Compressor`, or string such as `"int8"`; or `None`.

    Returns:
        `Compressor`, name of the dtype to cast to, or `None` for no compression.
    """
    if option == "int8":
        return BlockQuantized()
    return COMMUNICATION_DTYPES[option] if isinstance(option, str) else option
