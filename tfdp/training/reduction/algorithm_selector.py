"""Selection of an all-reduce algorithm and wire formats for each bucket."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground.links import DEFAULT_LINKS, Links
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import Bucket, BucketPlan
from tfdp.ground.plans.cost_model import candidates_for, choose, predict_seconds
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import HIERARCHICAL, RING, Algorithm
from tfdp.training.compression.algorithm_choice import AlgorithmChoice, WireFormat
from tfdp.training.reduction.compressor_choice import LevelFormats, best_choice

# Compression is chosen only if it saves this fraction of the predicted time: the cost
# model does not include the two casts of a compressed bucket.
_MIN_SAVED_FRACTION = 0.1
# Dtypes of buckets that may be compressed. Half precision is left out: its elements
# already have the two bytes that a 16-bit wire format sends.
_COMPRESSIBLE_DTYPES = ("float32", "float64")


class AlgorithmSelector:
    """Selector of the all-reduce algorithm of each bucket, the same on all workers.

    Args:
        options: `CommunicationOptions`, with algorithm, compression and links.
        topology: `Topology` of all replicas.
        backend: String, `"nccl"`, `"ring"`, `"direct"` or `"mpi"`.
        warn: Bool, whether to warn of options without an effect in this topology.
            Defaults to `True`.

    Raises:
        ValueError: If Adasum cannot combine the nodes.
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
        self._backend = backend
        self.links = options.links or DEFAULT_LINKS[backend]
        self.are_links_known = options.links is not None
        self._fixed, problem = _fixed_algorithm(options, topology)
        self._formats = LevelFormats.of(options, topology)
        self._compresses = options.compression is not None
        self.combines_means = self._fixed is not None and self._fixed.is_adasum
        inner, outer = options.compression_levels
        if outer and not inner and topology.num_nodes == 1:
            problem = problem or (
                "`compression` across nodes has no effect: all replicas are on one node"
            )
        if problem and warn:
            user_code.warn(f"{problem}.")

    @property
    def depends_on_links(self) -> bool:
        """Bool, whether measured links could change the choice of algorithms.

        They could if algorithms are chosen by predicted times for more than two
        replicas. NCCL always uses default links: a measurement would create a
        communicator for each pair of GPUs, and its memory is never freed.
        """
        is_chosen = self._fixed is None and self._backend != "nccl"
        return is_chosen and self.topology.num_replicas > 2

    @property
    def needs_whole_buckets(self) -> bool:
        """Bool, whether each bucket must be reduced as a whole, not in slices.

        It is true for Adasum and for compressors that cannot compress a slice alone.
        """
        if not self._formats.has_compressors:
            return self.combines_means
        return not self._formats.cuts_buckets

    @property
    def is_hierarchical(self) -> bool:
        """Bool, whether buckets are reduced inside nodes first, then across nodes.

        With `algorithm="auto"`, which selects an algorithm for each bucket, it is true
        if the topology allows a hierarchical one.
        """
        is_flat = self._fixed is not None and not self._fixed.is_hierarchical
        return self.topology.supports_hierarchy and not is_flat

    def set_links(self, links: Links) -> None:
        """Replace the default links, from which times are predicted, by measured ones.

        Every worker must set the same links: they select the algorithms.

        Args:
            links: `Links`, latency and bandwidth inside and across nodes.
        """
        self.links = links
        self.are_links_known = True

    def with_options(self, options: CommunicationOptions) -> AlgorithmSelector:
        """Create a selector for the same replicas and links with other options.

        Args:
            options: `CommunicationOptions` of the new selector.
        """
        selector = AlgorithmSelector(options, self.topology, self._backend, warn=False)
        if self.are_links_known:
            selector.set_links(self.links)
        return selector

    def select_for(
        self, plan: BucketPlan, *, may_compress: bool
    ) -> tuple[AlgorithmChoice, ...]:
        """Select the algorithm of each bucket of a plan.

        Args:
            plan: `BucketPlan`.
            may_compress: Bool, whether the buckets have gradients, which may be
                compressed and combined by Adasum; other tensors are summed exactly.

        Returns:
            Tuple of `AlgorithmChoice`, one for each bucket.

        Raises:
            ValueError: If integers were to be compressed, or combined by Adasum.
        """
        if may_compress and self._compresses:
            _check_floating(plan, "compression")
        if may_compress and self.combines_means:
            _check_floating(plan, "algorithm")
        return tuple(
            self.select(
                bucket.num_bytes,
                bucket.dtype,
                may_compress=may_compress,
                bucket=bucket,
            )
            for bucket in plan
        )

    def select(
        self,
        num_bytes: int,
        dtype: str,
        *,
        may_compress: bool = True,
        bucket: Bucket | None = None,
    ) -> AlgorithmChoice:
        """Select the algorithm of a bucket, and whether its messages are compressed.

        Args:
            num_bytes: Int, size of the bucket in bytes.
            dtype: String, dtype of the bucket.
            may_compress: Bool, whether the bucket has gradients, which may be
                compressed and combined by Adasum; other tensors are summed exactly.
                Defaults to `True`.
            bucket: `Bucket`, whose entries a compressor may need to predict the sent
                bytes; or `None` for a part of a bucket. Defaults to `None`.

        Returns:
            `AlgorithmChoice` with the predicted time.
        """
        if self.topology.num_replicas == 1:
            return AlgorithmChoice()
        if self.combines_means and not may_compress:
            algorithm = HIERARCHICAL if self.is_hierarchical else RING
            seconds = predict_seconds(algorithm, num_bytes, self.topology, self.links)
            return AlgorithmChoice(algorithm, seconds=seconds)
        plain = self._fastest(num_bytes, None, None)
        if not may_compress or dtype not in _COMPRESSIBLE_DTYPES:
            return plain
        compressed: AlgorithmChoice | None = None
        formats = self._formats
        if formats.has_compressors:
            compressed = best_choice(
                formats,
                self._candidates(),
                (num_bytes, dtype, () if bucket is None else bucket.entries),
                self.topology,
                self.links,
            )
        elif formats.inner or formats.outer:
            fraction = 2 / tf.as_dtype(dtype).size
            compressed = self._fastest(
                num_bytes, formats.inner, formats.outer, fraction
            )
        if compressed is None:
            return plain
        is_worth_it = compressed.seconds < plain.seconds * (1 - _MIN_SAVED_FRACTION)
        is_taken = is_worth_it or compressed.is_forced
        return compressed if is_taken else plain

    def _fastest(
        self,
        num_bytes: int,
        inner: str | None,
        outer: str | None,
        fraction: float = 1.0,
    ) -> AlgorithmChoice:
        """Choose the fastest algorithm of a bucket, given the dtypes to send it in.

        A flat algorithm has one dtype for all messages: if the two levels have
        different ones, it sends elements in the dtype of the bucket.

        Args:
            num_bytes: Int, size of the bucket in bytes.
            inner: String, dtype sent inside nodes, or `None` for that of the bucket.
            outer: String, dtype sent across nodes, or `None` for that of the bucket.
            fraction: Float, size of an element in these dtypes relative to that in the
                bucket. Defaults to 1.
        """
        algorithm, seconds = choose(
            num_bytes,
            self.topology,
            self.links,
            self._candidates(),
            inner_ratio=fraction if inner else 1.0,
            outer_ratio=fraction if outer else 1.0,
        )
        if not algorithm.is_hierarchical and inner != outer:
            # A flat algorithm has one dtype for all messages, so it cannot compress
            # only the messages inside nodes or only those across nodes: it sends all of
            # them uncompressed.
            inner = outer = None
        wire_formats = WireFormat(dtype_name=inner), WireFormat(dtype_name=outer)
        return AlgorithmChoice(algorithm, *wire_formats, seconds)

    def _candidates(self) -> tuple[Algorithm, ...]:
        """Return the algorithms to choose from, in the order of preference.

        The algorithm of the options is the only one. With `"auto"` all that fit the
        topology are returned; while links are neither given nor measured, only the
        ring and the hierarchical one.
        """
        if self._fixed is not None:
            return (self._fixed,)
        candidates = candidates_for(self.topology)
        if self.are_links_known:
            return candidates
        # The links are defaults, not measured. They suffice to compare bytes across
        # nodes, but not latencies, so algorithms that only save latency are left out.
        safe = (RING, HIERARCHICAL)
        return tuple(algorithm for algorithm in candidates if algorithm in safe)


def _check_floating(plan: BucketPlan, option: str) -> None:
    """Raise a `ValueError` if a bucket of a plan has integers.

    Args:
        plan: `BucketPlan`.
        option: String, name of the option that excludes integers, for the message.
    """
    for bucket in plan:
        if not tf.as_dtype(bucket.dtype).is_floating:
            raise ValueError(
                f"`{option}` supports only floating-point gradients. Remove it for "
                f"this model. Received: {bucket.entries[0].name!r} of {bucket.dtype}"
            )


def _fixed_algorithm(
    options: CommunicationOptions, topology: Topology
) -> tuple[Algorithm | None, str]:
    """Return the algorithm that the options ask for, or a replacement that can run.

    Args:
        options: `CommunicationOptions`.
        topology: `Topology` of all replicas.

    Returns:
        Tuple of an `Algorithm`, or `None` for `"auto"`, which selects one for each
        bucket; and a string, the warning that the algorithm is replaced, or `""`.

    Raises:
        ValueError: If Adasum cannot combine the nodes.
    """
    option = options.algorithm
    if option == "auto":
        return None, ""
    if isinstance(option, Mapping):
        wanted = Algorithm(HIERARCHICAL.name, **option)
    else:
        wanted = Algorithm(option)
    if not wanted.is_hierarchical:
        return wanted, ""
    if wanted.is_adasum:
        return _adasum_of_nodes(wanted, topology)
    what = '`algorithm="hierarchical"`'
    if topology.num_nodes == 1:
        return Algorithm(wanted.inner), (
            f"{what} falls back to {wanted.inner!r}: all replicas are on one node"
        )
    if not topology.is_even:
        return RING, (
            f"{what} falls back to 'ring': it needs the same number of replicas on "
            "every node, but they have "
            f"{', '.join(str(len(node)) for node in topology.nodes)}"
        )
    return wanted, ""


def _adasum_of_nodes(wanted: Algorithm, topology: Topology) -> tuple[Algorithm, str]:
    """Return Adasum across nodes or a replacement that can run, and a warning.

    Args:
        wanted: `Algorithm` of the options, Adasum across nodes.
        topology: `Topology` of all replicas.

    Returns:
        Tuple of an `Algorithm`, `wanted` if there are several nodes or else `RING`, and
        a string: the warning, or `""` for none.

    Raises:
        ValueError: If nodes have different numbers of replicas.
    """
    if topology.num_nodes == 1:
        return RING, (
            '`algorithm={"outer": "adasum"}` falls back to a mean: all replicas are on '
            "one node"
        )
    if not topology.is_even:
        raise ValueError(
            "Adasum across nodes needs the same number of replicas on every node. Use "
            '`algorithm="adasum"`, between all replicas. Received: nodes with '
            f"{', '.join(str(len(node)) for node in topology.nodes)}"
        )
    return wanted, ""
