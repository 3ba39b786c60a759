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
from tfdp.training.compression.compressor import Compressor

RING = Algorithm("ring")


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """Algorithm and communication dtypes that one bucket is reduced with.

    Args:
        algorithm: `Algorithm`. Defaults to the ring.
        inner_dtype: String, dtype that travels inside nodes, and everywhere with
            a flat algorithm; or `None`, its own. Defaults to `None`.
        outer_dtype: String, dtype that travels across nodes, or `None`. Defaults
            to `None`.
        seconds: Float, how long it is predicted to take. Defaults to `0.0`.
        compressors: Tuple of `Compressor` or `None`, inside nodes and across them,
            both the same with a flat algorithm. Defaults to none.
        ratios: Tuple of two floats, the bytes that these send over those of an
            all-reduce, NaN where that is not known. Defaults to 1.

    Example:

    >>> print(AlgorithmChoice(Algorithm("hierarchical"), outer_dtype="bfloat16"))
    hierarchical (ring, ring), bfloat16 across nodes
    """

    algorithm: Algorithm = RING
    inner_dtype: str | None = None
    outer_dtype: str | None = None
    seconds: float = 0.0
    compressors: tuple[Compressor | None, Compressor | None] = (None, None)
    ratios: tuple[float, float] = (1.0, 1.0)

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
        inner, outer = (
            None if compressor is None else str(compressor)
            for compressor in self.compressors
        )
        return inner or self.inner_dtype, outer or self.outer_dtype

    def byte_ratios(self, itemsize: int) -> tuple[float, float]:
        """Bytes inside nodes and across them for each byte of an all-reduce.

        Args:
            itemsize: Int, the bytes of an element of the bucket.
        """
        inner, outer = (
            _known(ratio) if name is None else tf.as_dtype(name).size / itemsize
            for ratio, name in zip(
                self.ratios, (self.inner_dtype, self.outer_dtype), strict=True
            )
        )
        return inner, outer

    @property
    def is_unpredictable(self) -> bool:
        """Bool, whether it is not known how many bytes its compressors send."""
        return any(math.isnan(ratio) for ratio in self.ratios)

    @property
    def is_needed(self) -> bool:
        """Bool, whether its compressors do more than to send less."""
        return any(
            compressor is not None and compressor.replaces_momentum
            for compressor in self.compressors
        )

    @property
    def levels(self) -> CompressedRoute:
        """`CompressedRoute`, what travels on each level."""
        inner, outer = map(Wire, self.compressors, self._dtypes)
        has_levels = self.algorithm.has_levels
        return CompressedRoute(inner, outer, has_levels, self.all_reduce)

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Callable of the algorithm alone, see `tfdp.communication.collectives.ring`.

        That of Adasum asks for the `sizes` of the gradients in a bucket, too.
        """
        inner, outer = self._dtypes
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

    @property
    def _dtypes(self) -> list[tf.DType | None]:
        names = (self.inner_dtype, self.outer_dtype)
        return [None if name is None else tf.as_dtype(name) for name in names]


def _known(ratio: float) -> float:
    """A ratio, or 1 where it is not known."""
    return 1.0 if math.isnan(ratio) else ratio
