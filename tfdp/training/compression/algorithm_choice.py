"""Algorithm and wire formats of one bucket."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import tensorflow as tf

from tfdp.communication.collectives import (
    FLAT,
    Level,
    adasum,
    adasum_across_nodes,
    hierarchical,
)
from tfdp.ground.options import ADASUM
from tfdp.ground.plans.traffic import RING, Algorithm
from tfdp.training.compression.compressor import Compressor


@dataclasses.dataclass(frozen=True)
class WireFormat:
    """Format of messages on one level: compressed, cast to a dtype, or unchanged.

    The levels of a hierarchical reduction are inside nodes and across nodes.

    Args:
        compressor: `Compressor`, or `None`. Defaults to `None`.
        dtype_name: String, name of the dtype that elements are cast to, or `None` for
            no cast. Defaults to `None`.
        ratio: Float, bytes that the compressor sends, divided by those of an all-reduce
            without it; NaN if unknown. Defaults to 1.
    """

    compressor: Compressor | None = None
    dtype_name: str | None = None
    ratio: float = dataclasses.field(default=1.0, compare=False)

    @property
    def dtype(self) -> tf.DType | None:
        """`tf.DType` that elements are cast to, or `None` for no cast."""
        return None if self.dtype_name is None else tf.as_dtype(self.dtype_name)

    @property
    def name(self) -> str | None:
        """String, name of the compressor or dtype, or `None` if there is neither."""
        return self.dtype_name if self.compressor is None else str(self.compressor)

    def byte_ratio(self, itemsize: int) -> float:
        """Return the bytes sent, divided by those of messages in the bucket's dtype.

        It is 1 if a compressor does not know how many bytes it sends.

        Args:
            itemsize: Int, size in bytes of an element of the bucket.
        """
        if self.dtype is not None:
            return self.dtype.size / itemsize
        return 1.0 if math.isnan(self.ratio) else self.ratio


# The default wire format: without a compressor, elements are sent in their own dtype.
_PLAIN = WireFormat()


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """Algorithm and wire formats by which one bucket is reduced.

    Args:
        algorithm: `Algorithm`. Defaults to the ring.
        inner: `WireFormat`, format of messages inside nodes, and of all messages of a
            flat algorithm. Defaults to uncompressed elements.
        outer: `WireFormat`, format of messages across nodes. Defaults to uncompressed
            elements.
        seconds: Float, predicted time of the reduction. Defaults to `0.0`.

    Example:

    >>> half = WireFormat(dtype_name="bfloat16")
    >>> print(AlgorithmChoice(Algorithm("hierarchical"), outer=half))
    hierarchical (ring, ring), bfloat16 across nodes
    """

    algorithm: Algorithm = RING
    inner: WireFormat = _PLAIN
    outer: WireFormat = _PLAIN
    seconds: float = 0.0

    def __str__(self) -> str:
        text, (inner, outer) = str(self.algorithm), self.wire_formats
        if not self.algorithm.is_hierarchical or inner == outer:
            return f"{text}, {inner}" if inner else text
        if inner:
            text += f", {inner} inside nodes"
        return text + (f", {outer} across nodes" if outer else "")

    @property
    def wire_formats(self) -> tuple[str | None, str | None]:
        """Names of the wire formats inside and across nodes, `None` if uncompressed."""
        return self.inner.name, self.outer.name

    @property
    def is_forced(self) -> bool:
        """Bool, whether compressors are used whatever the predicted time.

        They are if the number of bytes is not known, or if a compressor replaces the
        optimizer's momentum.
        """
        return any(
            math.isnan(wire.ratio)
            or (wire.compressor is not None and wire.compressor.replaces_momentum)
            for wire in (self.inner, self.outer)
        )

    @property
    def compressors(self) -> list[Compressor]:
        """List of `Compressor`, those of the levels that have one."""
        of_levels = (self.inner.compressor, self.outer.compressor)
        return [compressor for compressor in of_levels if compressor is not None]

    @property
    def is_compressed(self) -> bool:
        """Bool, whether a level has a compressor."""
        return bool(self.compressors)

    @property
    def needs_whole_bucket(self) -> bool:
        """Bool, whether sharded gradients, too, are all-reduced, not reduce-scattered.

        It is true for Adasum and for compressors that cannot compress a slice alone.
        """
        cut = all(compressor.cuts_buckets for compressor in self.compressors)
        return self.algorithm.is_adasum or not cut

    @property
    def is_single_level(self) -> bool:
        """Bool, whether one compressed reduction runs over all replicas.

        Otherwise there is one inside nodes and one across nodes.
        """
        outer = self.outer.compressor
        is_whole = outer is not None and not outer.cuts_buckets
        return not self.algorithm.is_hierarchical or (
            self.inner == self.outer and is_whole
        )

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Callable that all-reduces a bucket without compressors.

        Its arguments are those of `tfdp.communication.collectives.ring`; for Adasum
        also `sizes`, the sizes of the gradients in the bucket.
        """
        inner, outer = self.inner.dtype, self.outer.dtype
        if self.algorithm.name == ADASUM:
            return functools.partial(adasum, wire_dtype=inner)
        if self.algorithm.is_adasum:
            return functools.partial(
                adasum_across_nodes, inner_dtype=inner, outer_dtype=outer
            )
        if not self.algorithm.is_hierarchical:
            return functools.partial(FLAT[self.algorithm.name], wire_dtype=inner)
        return functools.partial(
            hierarchical,
            inner=Level(self.algorithm.inner, inner),
            outer=Level(self.algorithm.outer, outer),
        )
