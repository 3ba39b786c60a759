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
from tfdp.ground.plans.traffic import Algorithm
from tfdp.training.compression.compressed_reduce import CompressedRoute, Wire

RING = Algorithm("ring")
# Elements travel in their own dtype, without a compressor.
_PLAIN = Wire()


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """Algorithm and wire formats by which one bucket is reduced.

    Args:
        algorithm: `Algorithm`. Defaults to the ring.
        inner: `Wire`, format of messages inside nodes, and of all messages of a flat
            algorithm. Defaults to uncompressed elements.
        outer: `Wire`, format of messages across nodes. Defaults to uncompressed
            elements.
        seconds: Float, predicted time of the reduction. Defaults to `0.0`.

    Example:

    >>> half = Wire(dtype_name="bfloat16")
    >>> print(AlgorithmChoice(Algorithm("hierarchical"), outer=half))
    hierarchical (ring, ring), bfloat16 across nodes
    """

    algorithm: Algorithm = RING
    inner: Wire = _PLAIN
    outer: Wire = _PLAIN
    seconds: float = 0.0

    def __str__(self) -> str:
        text, (inner, outer) = str(self.algorithm), self.wires
        if not self.algorithm.has_levels or inner == outer:
            return f"{text}, {inner}" if inner else text
        if inner:
            text += f", {inner} inside nodes"
        return text + (f", {outer} across nodes" if outer else "")

    @property
    def wires(self) -> tuple[str | None, str | None]:
        """Names of the wire formats inside and across nodes, `None` if plain."""
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
    def levels(self) -> CompressedRoute:
        """`CompressedRoute` with the wire formats of both levels."""
        has_levels = self.algorithm.has_levels
        return CompressedRoute(self.inner, self.outer, has_levels, self.all_reduce)

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Callable that all-reduces a bucket without compressors.

        Its arguments are those of `tfdp.communication.collectives.ring`; for Adasum
        also `sizes`, the sizes of the gradients in the bucket.
        """
        inner, outer = self.inner.dtype, self.outer.dtype
        if self.algorithm.name == ADASUM:
            return functools.partial(adasum, reduce_dtype=inner)
        if self.algorithm.is_adasum:
            return functools.partial(
                adasum_across_nodes, inner_dtype=inner, outer_dtype=outer
            )
        if not self.algorithm.has_levels:
            return functools.partial(FLAT[self.algorithm.name], reduce_dtype=inner)
        return functools.partial(
            hierarchical,
            inner=Level(self.algorithm.inner, inner),
            outer=Level(self.algorithm.outer, outer),
        )
