"""Which all-reduce algorithm takes each bucket, and in which dtype it travels."""

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
from tfdp.plans.cost_model import candidates_for, choose
from tfdp.plans.traffic import Algorithm

RING = Algorithm("ring")
# What compression has to save: it costs two casts, which no model knows.
_LEAST_GAIN = 0.1
# What may travel in two bytes.
_COMPRESSIBLE = ("float32", "float64")


@dataclasses.dataclass(frozen=True)
class AlgorithmChoice:
    """How one bucket is reduced.

    Args:
        algorithm: `Algorithm`. Defaults to the ring.
        inner_wire: String, dtype that travels inside nodes, and everywhere with
            a flat algorithm; or `None`, its own. Defaults to `None`.
        outer_wire: String, dtype that travels across nodes, or `None`. Defaults
            to `None`.
        seconds: Float, how long it is predicted to take. Defaults to `0.0`.

    Example:

    >>> print(Route(Algorithm("hierarchical"), outer_wire="bfloat16"))
    hierarchical (ring, ring), bfloat16 across nodes
    """

    algorithm: Algorithm = RING
    inner_wire: str | None = None
    outer_wire: str | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        text = str(self.algorithm)
        if self.algorithm.name != "hierarchical" or self.inner_wire == self.outer_wire:
            return f"{text}, {self.inner_wire}" if self.inner_wire else text
        if self.inner_wire:
            text += f", {self.inner_wire} inside nodes"
        return text + (f", {self.outer_wire} across nodes" if self.outer_wire else "")

    @property
    def all_reduce(self) -> Callable[..., tf.Tensor]:
        """Its function, see `tfdp.collectives.ring`."""
        inner, outer = (
            _reduce_dtype(self.inner_wire),
            _reduce_dtype(self.outer_wire),
        )
        if self.algorithm.name != "hierarchical":
            return functools.partial(FLAT[self.algorithm.name], reduce_dtype=inner)
        return functools.partial(
            hierarchical,
            inner=Level(self.algorithm.inner, inner),
            outer=Level(self.algorithm.outer, outer),
        )


class AlgorithmSelector:
    """Chooses the route of each bucket, alike on every worker.

    Args:
        options: `CommunicationOptions`.
        topology: `Topology` of all replicas.
        backend: String, `"ring"` or `"nccl"`.
        tells: Bool, whether to warn of options that have no effect here.
            Defaults to `True`.
    """

    def __init__(
        self,
        options: CommunicationOptions,
        topology: Topology,
        backend: str,
        *,
        tells: bool = True,
    ) -> None:
        self.topology = topology
        self.links = options.links or DEFAULT_LINKS[backend]
        self.are_links_known = options.links is not None
        self._fixed, problem = _fixed_algorithm(options, topology)
        self._inner, self._outer = options.reduce_dtypes
        if self._outer and not self._inner and topology.num_nodes == 1:
            problem = problem or (
                "`compression` across nodes has no effect: all replicas are on one node"
            )
        if problem and tells:
            warnings.warn(f"{problem}.", stacklevel=2)

    @property
    def chooses(self) -> bool:
        """Whether it depends on the links which algorithm is taken."""
        return self._fixed is None and self.topology.num_replicas > 2

    @property
    def goes_by_level(self) -> bool:
        """Whether to go inside nodes first and then across, where bytes count."""
        topology = self.topology
        has_levels = topology.num_nodes > 1 and topology.replicas_per_node > 1
        is_flat = self._fixed is not None and self._fixed.name != "hierarchical"
        return has_levels and topology.is_even and not is_flat

    def set_links(self, links: Links) -> None:
        """Takes what was measured; it has to be the same on all workers."""
        self.links = links
        self.are_links_known = True

    def select(
        self, num_bytes: int, dtype: str, *, may_compress: bool = True
    ) -> AlgorithmChoice:
        """The route of a bucket.

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
        share = 2 / tf.as_dtype(dtype).size
        packed = self._fastest(num_bytes, self._inner, self._outer, share)
        gains = packed.seconds < plain.seconds * (1 - _LEAST_GAIN)
        return packed if gains else plain

    def _fastest(
        self, num_bytes: int, inner: str | None, outer: str | None, share: float = 1.0
    ) -> AlgorithmChoice:
        algorithm, seconds = choose(
            num_bytes,
            self.topology,
            self.links,
            self._candidates(),
            inner_wire=share if inner else 1.0,
            outer_wire=share if outer else 1.0,
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


def _fixed_algorithm(
    options: CommunicationOptions, topology: Topology
) -> tuple[Algorithm | None, str]:
    """The algorithm that was asked for, as far as it can run, and why not."""
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
