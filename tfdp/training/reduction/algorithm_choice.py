"""Algorithm of a bucket, and what travels by it."""

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
_PLAIN = Wire()


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """Algorithm and communication dtypes that one bucket is reduced with.

    Args:
        algorithm: `Algorithm`. Defaults to the ring.
        inner: `Wire`, what travels inside nodes, and everywhere with a flat algorithm.
            Defaults to elements as they are.
        outer: `Wire`, what travels across nodes. Defaults to elements as they are.
        seconds: Float, how long it is predicted to take. Defaults to `0.0`.

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
        """Names of what travels inside nodes and across them, `None` for floats."""
        return self.inner.name, self.outer.name

    @property
    def is_forced(self) -> bool:
        """Bool, whether compressors are taken however long it takes.

        As where it is not known how many bytes they send, or they do more than that.
        """
        return any(
            math.isnan(wire.ratio)
            or (wire.compressor is not None and wire.compressor.replaces_momentum)
            for wire in (self.inner, self.outer)
        )

    @property
    def levels(self) -> CompressedRoute:
        """`CompressedRoute`, what travels on each level."""
        has_levels = self.algorithm.has_levels
        return CompressedRoute(self.inner, self.outer, has_levels, self.all_reduce)

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Callable of the algorithm alone, see `tfdp.communication.collectives.ring`.

        That of Adasum asks for the `sizes` of the gradients in a bucket, too.
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
