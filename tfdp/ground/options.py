"""Communication options of a strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.ground.arguments import (
    check_choice,
    checked_bool,
    checked_integer,
    checked_number,
)
from tfdp.ground.links import Links

# These algorithms treat all replicas as one level, so a hierarchical algorithm can use
# each of them inside nodes or across nodes.
FLAT_ALGORITHMS = ("ring", "tree", "halving_doubling")
ADASUM = "adasum"
ALGORITHMS = ("auto", *FLAT_ALGORITHMS, "hierarchical", ADASUM)
_ALGORITHMS_BY_LEVEL = {"inner": FLAT_ALGORITHMS, "outer": (*FLAT_ALGORITHMS, ADASUM)}
BACKENDS = ("auto", "nccl", "ring", "direct", "mpi")
ON_LOSS = ("stop", "continue")
UNEVEN = ("join", "stop")
GATHERS = ("allow", "error")
COMMUNICATION_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
COMPRESSIONS = (*COMMUNICATION_DTYPES, "int8")
_LEVELS = ("inner", "outer")


DEFAULT_BUCKET_MB = 25.0
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationOptions:
    """Options of the communication between replicas.

    Args:
        bucket_mb: Float, largest size of a bucket in megabytes (2**20 bytes).
            Gradients are concatenated into buckets and a bucket is reduced by
            one collective. A variable larger than this has a bucket of its
            own. `"auto"`: a long `fit` tries several plans in its first steps and
            keeps one that is faster than the default. Defaults to `25.0`, or to an
            eighth of all gradients, at least 1 MB, if that is less; any other size
            than 25 is used unchanged.
        first_bucket_mb: Float, largest size of the first bucket in megabytes.
            It is smaller so that communication starts early in the backward
            pass. Defaults to `1.0`.
        algorithm: String, the all-reduce algorithm: `"ring"`, `"tree"`,
            `"halving_doubling"`, `"hierarchical"`, or `"auto"`, the fastest
            for each bucket by the cost model of the links. A dict such as
            `{"inner": "ring", "outer": "tree"}` is the hierarchical algorithm with
            one algorithm inside nodes and one across them. `"adasum"` combines
            gradients pair by pair instead of averaging: parallel gradients are
            averaged, orthogonal ones summed. It combines those of replicas, or with
            `{"outer": "adasum"}` those of nodes. Defaults to `"auto"`.
        backend: String, the library that moves the bytes: `"nccl"` (GPUs),
            `"ring"` (TensorFlow's own, over memory and gRPC), `"direct"` (between
            CPU processes: shared memory on one host, TCP between hosts), `"mpi"`
            (between CPU processes that MPI has started, with mpi4py), or `"auto"`:
            NCCL if every replica has its own physical GPU; between workers without
            GPUs, `"mpi"` in an MPI job and else `"direct"`. Defaults to `"auto"`.
        interface: String, name or address of the network interface that `"direct"`
            uses, or `None`: the one that this worker's host name in the cluster
            resolves to. Defaults to `None`.
        compression: `"fp16"` or `"bf16"`, the dtype in which gradients are sent;
            `"int8"` or another `tfdp.compression.Compressor`, which keeps the
            residual for the next step; or `None`, the gradients' own dtype. Sums are
            always computed in the gradients' own dtype. A dict such as
            `{"outer": "int8"}` compresses only across nodes, or only inside them.
            Buckets that would not gain are not compressed. Defaults to `None`.
        node_size: Int, replicas of consecutive ranks that count as one node, or
            `None`: workers on one host are one node. Defaults to `None`.
        nodes: Sequence of strings, a node's name for each worker, or `None`.
            Defaults to `None`.
        links: `tfdp.options.Links`, latency and bandwidth inside and across nodes, or
            `None`: they are measured if a `fit` is long enough to repay the
            measurement, and assumed otherwise. Defaults to `None`.
        timeout_seconds: Float or `None`, how long workers wait for a missing worker,
            for a heartbeat of a worker that hangs, and for a data source that
            yields no batch while its processes are idle. With `None` workers wait
            indefinitely and warn, but only 60 seconds for a heartbeat. Defaults to
            `None`.
        on_loss: String, what `fit` does if a worker is lost. `"stop"`: it raises an
            error on all others. `"continue"`: the others continue from the newest
            state that `BackupAndRestore` has saved, within the same call, on the same
            global batches; for `backend="direct"`. Defaults to `"stop"`.
        min_workers: Int, least number of workers with which `fit` continues. Defaults
            to 1.
        backup_workers: Int, number of late workers that a step of `fit` does not wait
            for: it takes the first gradients, weighted by their rows, and drops late
            ones; for `backend="direct"`. It is not exact, since dropped rows have no
            effect. Defaults to 0.
        uneven: String, what `fit` does if some workers have more batches than
            others. `"join"`: an epoch continues until the last worker has no batch
            left; workers without data add nothing, and every sample has the same
            weight. `"stop"`: the epoch ends for all workers as soon as one has no
            batch left, and the other workers' remaining batches are left out.
            Validation, `evaluate`, `predict` and custom loops always use all
            batches, since every sample counts there. Defaults to `"join"`.
        sync_batch_norm: Bool, whether every `BatchNormalization` normalizes by the
            moments of the global batch, as with `synchronized=True`. It then waits for
            an all-reduce in the forward and the backward pass. Defaults to `False`:
            the moments of each replica's own rows, as in TensorFlow.
        gathers: String, how to handle a step that gathers large tensors because an
            operation needs the whole batch: `"allow"` warns once for a model;
            `"error"` raises before the first step. Defaults to `"allow"`.

    Raises:
        ValueError: If a value is out of range or unknown.

    Example:

    >>> options = CommunicationOptions(bucket_mb=8)
    >>> options.bucket_bytes
    8388608

    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating
    Data Parallel Training", https://arxiv.org/abs/2006.15704, for buckets and
    their default sizes.
    """

    bucket_mb: float | str = DEFAULT_BUCKET_MB
    first_bucket_mb: float = 1.0
    algorithm: str | Mapping[str, str] = "auto"
    backend: str = "auto"
    interface: str | None = None
    compression: Any = None
    node_size: int | None = None
    nodes: Sequence[str] | None = None
    links: Links | None = None
    timeout_seconds: float | None = None
    on_loss: str = "stop"
    min_workers: int = 1
    backup_workers: int = 0
    uneven: str = "join"
    sync_batch_norm: bool = False
    gathers: str = "allow"

    def __post_init__(self) -> None:
        size = "a size in megabytes"
        if not self.tunes_buckets:
            self._set_positive("bucket_mb", f'"auto" or {size}')
        self._set_positive("first_bucket_mb", size)
        if self.timeout_seconds is not None:
            self._set_positive("timeout_seconds", "a number of seconds or None")
        _check_algorithm(self.algorithm)
        check_choice("backend", self.backend, BACKENDS)
        if self.interface is not None and (
            not isinstance(self.interface, str) or not self.interface
        ):
            raise ValueError(
                "`interface` must be the name or an address of a network interface, "
                f"or None. Received: interface={self.interface!r}"
            )
        check_choice("on_loss", self.on_loss, ON_LOSS)
        least = checked_integer("min_workers", self.min_workers, 1)
        object.__setattr__(self, "min_workers", least)
        spare = checked_integer("backup_workers", self.backup_workers, 0)
        object.__setattr__(self, "backup_workers", spare)
        check_choice("uneven", self.uneven, UNEVEN)
        check_choice("gathers", self.gathers, GATHERS)
        is_synchronized = checked_bool("sync_batch_norm", self.sync_batch_norm)
        object.__setattr__(self, "sync_batch_norm", is_synchronized)
        _check_compression(self.compression)
        _check_adasum(self.algorithm, self.compression)
        if self.tunes_buckets:
            _check_no_residuals(self.compression_levels)
        if self.node_size is not None:
            size_of_node = checked_integer("node_size", self.node_size, 1, "or None")
            object.__setattr__(self, "node_size", size_of_node)
        _check_nodes(self.node_size, self.nodes)
        if self.backup_workers:
            _check_backup_workers(self)
        if self.links is not None and not isinstance(self.links, Links):
            raise ValueError(
                "`links` must be a `tfdp.options.Links` or None. "
                f"Received: links={self.links!r}"
            )

    @property
    def compression_levels(self) -> tuple[Any, Any]:
        """Tuple of the compressions inside and across nodes, each as it was given."""
        compression = self.compression
        if not isinstance(compression, Mapping):
            return compression, compression
        return compression.get("inner"), compression.get("outer")

    @property
    def tunes_buckets(self) -> bool:
        """Bool, whether a long `fit` tries several bucket plans."""
        return isinstance(self.bucket_mb, str) and self.bucket_mb == AUTO

    @property
    def bucket_bytes(self) -> int:
        """Largest size of a bucket, in bytes."""
        return int(self._largest_mb * 2**20)

    @property
    def adapts_buckets(self) -> bool:
        """Bool, whether buckets shrink for small models, as the default size does.

        It is true if `bucket_mb` is 25.0 or `"auto"`.
        """
        return self._largest_mb == DEFAULT_BUCKET_MB

    @property
    def first_bucket_bytes(self) -> int:
        """Largest size of the first bucket, in bytes."""
        return int(min(self.first_bucket_mb, self._largest_mb) * 2**20)

    @property
    def _largest_mb(self) -> float:
        """Float, largest size of a bucket in megabytes; for `"auto"` the default."""
        size = self.bucket_mb
        return DEFAULT_BUCKET_MB if isinstance(size, str) else size

    def _set_positive(self, name: str, what: str) -> None:
        """Check that a field is a number above zero, and store it as Python's own type.

        Args:
            name: String, name of the field.
            what: String, the allowed values in words, for the message, such as `"a
                number"`; the message adds that they are greater than zero.
        """
        text = f"{what}, greater than zero"
        value = checked_number(name, getattr(self, name), text, above=0)
        object.__setattr__(self, name, value)


def _check_algorithm(value: object) -> None:
    """Raise `ValueError` unless a value names an algorithm, or one for each level."""
    if not isinstance(value, Mapping):
        check_choice("algorithm", value, ALGORITHMS)
        return
    _check_keys("algorithm", value)
    for level, choice in value.items():
        check_choice(f'algorithm["{level}"]', choice, _ALGORITHMS_BY_LEVEL[level])


def _check_keys(name: str, value: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless a dict's keys are `"inner"`, `"outer"`, or both."""
    if not value or not set(value) <= set(_LEVELS):
        raise ValueError(
            f'`{name}` as a dict must have the key "inner" or "outer", or both. '
            f"Received: {name}={value!r}"
        )


def is_compressor(value: object) -> bool:
    """Return whether a value has the methods of a `tfdp.compression.Compressor`.

    The class itself is not compared, since it cannot be imported without TensorFlow.
    """
    methods = ("reduce", "reduce_scatter", "wire_ratio")
    is_instance = not isinstance(value, type)
    return is_instance and all(hasattr(value, method) for method in methods)


def _check_compression(value: Any) -> None:
    """Raise `ValueError` unless a value is valid as `compression`.

    Valid are `None`, a name such as `"bf16"`, a `Compressor`, and a mapping from
    `"inner"` and `"outer"` to such a name or `Compressor`.
    """
    if value is None or is_compressor(value):
        return
    if isinstance(value, Mapping):
        _check_keys("compression", value)
        for level, choice in value.items():
            if not is_compressor(choice):
                check_choice(f'compression["{level}"]', choice, COMPRESSIONS)
        _check_whole_buckets(value)
        return
    if not isinstance(value, str) or value not in COMPRESSIONS:
        listed = ", ".join(f'"{item}"' for item in COMPRESSIONS)
        raise ValueError(
            f"`compression` must be one of {listed}, a `tfdp.compression.Compressor`, "
            f"or a dict of them by level. Received: compression={value!r}"
        )


def _check_whole_buckets(levels: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a compressor that needs whole buckets would get parts.

    It would on the inner level, and on the outer level if the inner level has a
    compressor, too. Such a compressor has a false `cuts_buckets`.

    Args:
        levels: Mapping from `"inner"`, inside nodes, and `"outer"`, across nodes, to a
            compression; a level may be missing.
    """
    inner, outer = levels.get("inner"), levels.get("outer")
    sums_inside = not has_error_feedback(inner)
    if not getattr(inner, "cuts_buckets", True) or (
        not getattr(outer, "cuts_buckets", True) and not sums_inside
    ):
        raise ValueError(
            "A compressor of whole buckets must work on both levels, "
            '`compression=compressor`, or across nodes, `{"outer": compressor}`. '
            f"Received: compression={dict(levels)!r}"
        )


def _check_adasum(algorithm: Any, compression: Any) -> None:
    """Raise `ValueError` if Adasum is chosen, and other values exclude it.

    The other values are the inner algorithm and the compression.
    """
    levels = algorithm if isinstance(algorithm, Mapping) else {"outer": algorithm}
    if levels.get("outer") != ADASUM:
        return
    if levels.get("inner", "ring") != "ring":
        raise ValueError(
            '`algorithm={"outer": "adasum"}` needs the ring inside nodes. '
            f"Received: algorithm={dict(algorithm)!r}"
        )
    given = compression.values() if isinstance(compression, Mapping) else [compression]
    if any(map(has_error_feedback, given)):
        raise ValueError(
            '`algorithm="adasum"` does not support compressors with residuals, which '
            'are added to a sum. Use `compression="fp16"` or "bf16". Received: '
            f"algorithm={algorithm!r}, compression={compression!r}"
        )


def has_error_feedback(compression: Any) -> bool:
    """Return whether a compression keeps its errors (residuals) for the next step."""
    return compression not in (None, *COMMUNICATION_DTYPES)


def _check_no_residuals(levels: tuple[Any, Any]) -> None:
    """Raise `ValueError` if a compressor keeps residuals, which need fixed buckets.

    Args:
        levels: Tuple of the compressions inside nodes and across them.
    """
    if any(map(has_error_feedback, levels)):
        raise ValueError(
            "A compressor keeps a residual for each bucket, so buckets must not "
            'change. With `bucket_mb="auto"` compress to "fp16" or "bf16", or give a '
            f"size. Received: compression={levels!r}, inside nodes and across"
        )


def _check_backup_workers(options: CommunicationOptions) -> None:
    """Raise if an option cannot be combined with `backup_workers`, which is set.

    `backup_workers` needs `backend="direct"`. It excludes other values than the
    defaults of `algorithm`, `compression`, `on_loss` and the sizes of buckets.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in ("algorithm", "bucket_mb", "first_bucket_mb", "compression", "on_loss"):
        value = getattr(options, name)
        if value != defaults[name]:
            raise ValueError(
                "`backup_workers` sums the first gradients of a step on worker 0, and "
                f"cannot be combined with `{name}`. Remove one of them. "
                f"Received: backup_workers={options.backup_workers}, {name}={value!r}"
            )
    if options.backend not in ("auto", "direct"):
        raise ValueError(
            '`backup_workers` is for `backend="direct"`. '
            f"Received: backup_workers={options.backup_workers}, "
            f"backend={options.backend!r}"
        )


def _check_nodes(node_size: object, nodes: object) -> None:
    """Raise `ValueError` unless `nodes` is `None`, or names without `node_size`."""
    if nodes is not None and (
        isinstance(nodes, str)
        or not isinstance(nodes, Sequence)
        or not all(isinstance(name, str) and name.strip() for name in nodes)
    ):
        raise ValueError(
            "`nodes` must be a list with the name of a node for each worker, such as "
            f'["a", "a", "b", "b"]. Received: nodes={nodes!r}'
        )
    if node_size is not None and nodes is not None:
        raise ValueError(
            "Give `node_size` or `nodes`, not both. "
            f"Received: node_size={node_size!r}, nodes={nodes!r}"
        )
