"""Selection of each bucket's all-reduce algorithm and communication dtype."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping

import tensorflow as tf

from tfdp.cluster import Topology
from tfdp.collectives import FLAT, Level, hierarchical
from tfdp.links import DEFAULT_LINKS, Links
from tfdp.options import CommunicationOptions
from tfdp.plans.buckets import BucketPlan
from tfdp.plans.cost_model import candidates_for, choose
from tfdp.plans.traffic import Algorithm

RING = Algorithm("ring")
# What compression has to save: it costs two casts, which no model knows.
_LEAST_GAIN = 0.1
# What may travel in two bytes.
_COMPRESSIBLE = ("float32", "float64")


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

    Example:

    >>> print(AlgorithmChoice(Algorithm("hierarchical"), outer_dtype="bfloat16"))
    hierarchical (ring, ring), bfloat16 across nodes
    """

    algorithm: Algorithm = RING
    inner_dtype: str | None = None
    outer_dtype: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        text = str(self.algorithm)
        if (
            self.algorithm.name != "hierarchical"
            or self.inner_dtype == self.outer_dtype
        ):
            return f"{text}, {self.inner_dtype}" if self.inner_dtype else text
        if self.inner_dtype:
            text += f", {self.inner_dtype} inside nodes"
        return text + (f", {self.outer_dtype} across nodes" if self.outer_dtype else "")

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Callable of the algorithm, see `tfdp.collectives.ring`."""
        inner, outer = (
            _reduce_dtype(self.inner_dtype),
            _reduce_dtype(self.outer_dtype),
        )
        if self.algorithm.name != "hierarchical":
            return functools.partial(FLAT[self.algorithm.name], reduce_dtype=inner)
        return functools.partial(
            hierarchical,
            inner=Level(self.algorithm.inner, inner),
            outer=Level(self.algorithm.outer, outer),
        )


class AlgorithmSelector:
    """Selector of each bucket's algorithm, alike on every worker.

    Args:
        options: `CommunicationOptions`.
        topology: `Topology` of all replicas.
        backend: String, `"nccl"`, `"ring"`, `"direct"` or `"mpi"`.
        warn: Bool, whether to warn of options that have no effect here.
            Defaults to `True`.
    """

    def __init__(
        self,
        options: CommunicationOptions,
        topology: Topology,
        backend: str,
        *,
        warn: bool = True,
    ) -> None:
        self.topology = topology
        self.links = options.links or DEFAULT_LINKS[backend]
        self.are_links_known = options.links is not None
        self._fixed, problem = _fixed_algorithm(options, topology)
        self._inner, self._outer = options.reduce_dtypes
        self._compresses = options.compression is not None
        if self._outer and not self._inner and topology.num_nodes == 1:
            problem = problem or (
                "`compression` across nodes has no effect: all replicas are on one node"
            )
        if problem and warn:
            warnings.warn(f"{problem}.", stacklevel=2)

    @property
    def depends_on_links(self) -> bool:
        """True if the links decide which algorithm is taken."""
        return self._fixed is None and self.topology.num_replicas > 2

    @property
    def is_hierarchical(self) -> bool:
        """True if reductions go inside nodes first and then across."""
        topology = self.topology
        has_levels = topology.num_nodes > 1 and topology.replicas_per_node > 1
        is_flat = self._fixed is not None and self._fixed.name != "hierarchical"
        return has_levels and topology.is_even and not is_flat

    def set_links(self, links: Links) -> None:
        """Set measured links; they have to be the same on all workers."""
        self.links = links
        self.are_links_known = True

    def select_for(
        self, plan: BucketPlan, *, may_compress: bool
    ) -> tuple[AlgorithmChoice, ...]:
        """Select the algorithm of each bucket of a plan.

        Args:
            plan: `BucketPlan`.
            may_compress: Bool, whether buckets may be rounded.

        Returns:
            Tuple of `AlgorithmChoice`.

        Raises:
            ValueError: If integers were to be compressed.
        """
        if may_compress and self._compresses:
            _check_compressible(plan)
        return tuple(
            self.select(bucket.num_bytes, bucket.dtype, may_compress=may_compress)
            for bucket in plan
        )

    def select(
        self, num_bytes: int, dtype: str, *, may_compress: bool = True
    ) -> AlgorithmChoice:
        """Select the algorithm of a bucket.

        Args:
            num_bytes: Int, its size.
            dtype: String, its dtype.
            may_compress: Bool, whether it may be rounded. Defaults to `True`.

        Returns:
            A `AlgorithmChoice`.
        """
        if self.topology.num_replicas == 1:
            return AlgorithmChoice()
        plain = self._fastest(num_bytes, None, None)
        if not may_compress or dtype not in _COMPRESSIBLE:
            return plain
        if self._inner is None and self._outer is None:
            return plain
        fraction = 2 / tf.as_dtype(dtype).size
        compressed = self._fastest(num_bytes, self._inner, self._outer, fraction)
        is_worth_it = compressed.seconds < plain.seconds * (1 - _LEAST_GAIN)
        return compressed if is_worth_it else plain

    def _fastest(
        self,
        num_bytes: int,
        inner: str | None,
        outer: str | None,
        fraction: float = 1.0,
    ) -> AlgorithmChoice:
        algorithm, seconds = choose(
            num_bytes,
            self.topology,
            self.links,
            self._candidates(),
            inner_ratio=fraction if inner else 1.0,
            outer_ratio=fraction if outer else 1.0,
        )
        if algorithm.name != "hierarchical" and inner != outer:
            # What is compressed on one level only travels by no flat algorithm.
            inner = outer = inner if self.topology.num_nodes == 1 else None
        return AlgorithmChoice(algorithm, inner, outer, seconds)

    def _candidates(self) -> tuple[Algorithm, ...]:
        if self._fixed is not None:
            return (self._fixed,)
        candidates = candidates_for(self.topology)
        if self.are_links_known:
            return candidates
        # Assumed figures tell only what holds on any network: bytes between nodes.
        safe = (RING, Algorithm("hierarchical"))
        return tuple(algorithm for algorithm in candidates if algorithm in safe)


def _check_compressible(plan: BucketPlan) -> None:
    for bucket in plan:
        if not tf.as_dtype(bucket.dtype).is_floating:
            raise ValueError(
                "`compression` is for gradients of floating point. Leave it out for "
                f"this model. Received: {bucket.entries[0].name!r} of {bucket.dtype}"
            )


def _fixed_algorithm(
    options: CommunicationOptions, topology: Topology
) -> tuple[Algorithm | None, str]:
    """Algorithm that was asked for, as far as it can run, and why not."""
    given = options.algorithm
    if given == "auto":
        return None, ""
    if isinstance(given, Mapping):
        wanted = Algorithm("hierarchical", **given)
    else:
        wanted = Algorithm(given)
    if wanted.name != "hierarchical":
        return wanted, ""
    what = '`algorithm="hierarchical"`'
    if topology.num_nodes == 1:
        return Algorithm(wanted.inner), (
            f"{what} works as {wanted.inner!r}: all replicas are on one node"
        )
    if not topology.is_even:
        return RING, (
            f"{what} works as 'ring': it needs equally many replicas on every node, "
            f"which have {', '.join(str(len(node)) for node in topology.nodes)}"
        )
    return wanted, ""


def _reduce_dtype(name: str | None) -> tf.DType | None:
    return None if name is None else tf.as_dtype(name)
