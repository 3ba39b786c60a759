"""`FirstGradients`: sums of the gradients that arrive first at worker 0."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.background import BackgroundThread
from tfdp.communication.collectives.process_transport import host_of
from tfdp.communication.transport import (
    QuorumFollower,
    QuorumLeader,
    QuorumMember,
    Share,
    sum_into,
)
from tfdp.features.backup_workers.checks import check_model
from tfdp.ground._compat import runtime, tf_distribute
from tfdp.ground.base import batch_weight
from tfdp.ground.base.finalizers import finalizers
from tfdp.ground.text import pluralize
from tfdp.training.data.rows import count_of, take_rows
from tfdp.training.reduction.fusion import ReducedGradients, pack
from tfdp.training.reduction.gradient_exchange import GradientExchange
from tfdp.training.reduction.sparse import are_unique, sum_duplicates

# Worker 0 stores the sums of steps that another worker has not run yet, at most this
# many steps and bytes: beyond that, all wait for the worker.
_MAX_STEPS, _MAX_BYTES = 256, 256 << 20
# Source of the numbers in the names of connections: the two ends of a connection find
# each other by its name. The numbers agree on all workers, since these trace the same
# steps in the same order.
_names = itertools.count()
# A replica sends its number of rows and that of the global batch with its gradients, so
# that worker 0 can scale a sum that lacks the gradients of late workers.
_ROWS = tf.TensorSpec([2], tf.float64)


@dataclasses.dataclass
class Counts:
    """Counts of the steps of a `fit`, and of those that lack a worker's gradients.

    Args:
        steps: Int, steps so far.
        without: Counter from the rank of a worker to the number of steps whose sums
            lack its gradients, since they came too late. The same on all workers.
    """

    steps: int = 0
    without: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter
    )

    def describe(self) -> str:
        """Return text like `"Of 9 steps, 2 without worker 1."`, or `""` if all came."""
        parts = [
            f"{number:,} without worker {rank}"
            for rank, number in sorted(self.without.items())
        ]
        steps = pluralize(self.steps, "step")
        return f"Of {steps}, {', '.join(parts)}." if parts else ""


class FirstGradients(GradientExchange):
    """Gradient exchange in which worker 0 sums the first gradients that arrive.

    A step needs the gradients of all but `backup_workers` workers. Those that arrive
    later are dropped, and all workers receive the same sums.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained.
    """

    label = "`backup_workers`"

    def __init__(self, strategy: Any, model: Any) -> None:
        self.counts = Counts()
        self._strategy, self._model = strategy, weakref.ref(model)
        self._devices = [host_of(d) for d in strategy.extended.group.devices]
        # Number of sums that have arrived before this worker has run their steps: the
        # worker is behind if it is above 0. A variable, since the traced step reads it.
        self._waiting = runtime.plain_variable(0, tf.int64, self._devices[0])
        self._backgrounds: dict[tuple, BackgroundThread] = {}
        self._lock = threading.Lock()
        self._traced: set[int] = set()

    def begin_step(self, args: tuple, total: tf.Tensor | None) -> tuple:
        """Return the batch of a step; without rows if this worker is behind.

        Implements `GradientExchange.begin_step`. A worker is behind if sums of later
        steps have arrived already.

        Args:
            args: Tuple of nests of per-replica values, the rows of the local replicas.
            total: Scalar tensor, number of rows of the global batch, or `None` if it is
                unknown.

        Returns:
            Tuple like `args`. If this worker is behind, its tensors have no rows;
            values that are not tensors with rows stay.

        Raises:
            ValueError: If `total` is `None`, or if `check_model` rejects the model.
        """
        check_model(self._strategy, self._model())
        if total is None:
            raise ValueError(
                "`backup_workers` needs data whose rows each worker can count for all: "
                "arrays, or a `tf.data.Dataset` whose cardinality is known and whose "
                "`batch` is tf.data's. It does not support Python generators, "
                "`PyDataset`, and data that is sharded by file."
            )
        self._traced = set()
        is_behind = self._waiting.read_value() > 0

        def take(part: Any) -> Any:
            """Return a leaf of the batch, without rows if this worker is behind.

            Scalars, and leaves that are not tensors, are always returned unchanged.
            """
            if not tf.is_tensor(part) or part.shape.rank == 0:
                return part
            count = tf.cast(count_of(part), tf.int64)
            none = tf.zeros([], tf.int64)
            return take_rows(part, none, tf.where(is_behind, none, count))

        local = [
            keras.tree.map_structure(take, tf_distribute.select_replica(replica, args))
            for replica in range(len(self._devices))
        ]
        by_tensor = map(list, zip(*local, strict=True))
        return tuple(map(tf_distribute.per_replica, by_tensor))

    def reduce(
        self, gradients: list, variables: list[Any], replica: int
    ) -> ReducedGradients:
        """Implements `GradientExchange.reduce`: sum the gradients that arrive in time.

        Those of late workers are left out, and the sums are scaled to all rows.

        Args:
            gradients: List of tensors and `tf.IndexedSlices` of the running replica.
            variables: List of Keras variables, one for each gradient.
            replica: Int, index of the running replica among the local ones.

        Returns:
            `ReducedGradients`, the same on all replicas, with one bucket for each
            dtype.

        Raises:
            ValueError: At a second update of the optimizer in a step.
        """
        if replica in self._traced:
            raise ValueError(
                "`backup_workers` supports one update of the optimizer in a step. "
                f"Received: another one, of {pluralize(len(variables), 'variable')}"
            )
        self._traced.add(replica)
        flat = [
            g if isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g)
            for g in gradients
        ]
        for gradient, variable in zip(flat, variables, strict=True):
            if isinstance(gradient, tf.Tensor):
                gradient.set_shape(variable.shape)
        buckets = _buckets(flat)
        positions = [i for i, g in enumerate(flat) if isinstance(g, tf.IndexedSlices)]
        tensors = [pack([flat[i] for i in bucket]) for bucket in buckets]
        for position in positions:
            tensors += [flat[position].values, flat[position].indices]
        joined = range(len(buckets), len(tensors))
        specs = [
            tf.TensorSpec([None, *t.shape[1:]] if i in joined else t.shape, t.dtype)
            for i, t in enumerate(tensors)
        ]
        num_bytes = sum(
            math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables
        )
        background = self._background(
            tuple(map(id, variables)), specs, num_bytes, joined
        )
        background.launch(replica, [_rows(), *tensors])
        results = background.collect(replica)
        flats, rows = results[: len(buckets)], iter(results[len(buckets) :])
        sparse = {i: _joined(flat[i], next(rows), next(rows)) for i in positions}
        return ReducedGradients(flats, buckets, flat, sparse)

    def sum_by_share(self, share: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a tensor over the workers that send theirs in time.

        The sum is divided by the sum of these workers' shares, to make up for the late
        workers, whose tensors are left out.

        Args:
            share: Scalar float64 tensor, rows of this worker as a fraction of all.
            tensor: Tensor of shape `[size]`, on the host.

        Returns:
            Tensor of the same shape, the same on all workers.
        """
        spec = tf.TensorSpec(tensor.shape, tensor.dtype)
        background = self._background((), [spec], spec.shape[0] * spec.dtype.size)
        rows = tf.stack([tf.cast(share, tf.float64), tf.ones([], tf.float64)])
        background.launch(0, [rows, tensor])
        return background.collect(0)[0]

    def _background(
        self,
        key: tuple,
        specs: Sequence[tf.TensorSpec],
        num_bytes: int,
        joined: Collection[int] = (),
    ) -> BackgroundThread:
        """Return the thread that sums tensors over the workers that are in time.

        Each pair of `key` and `specs` has one thread, created at the first call.

        Args:
            key: Tuple of the `id`s of the variables whose gradients each local replica
                sends; empty for other tensors, which only the first one sends.
            specs: Sequence of `tf.TensorSpec`, the tensors that a replica sends.
            num_bytes: Int, size of the sums of a step in bytes.
            joined: Collection of ints, positions of the tensors that are concatenated;
                the others are summed. Defaults to none.
        """
        name = (key, *specs)
        with self._lock:
            if name not in self._backgrounds:
                devices = self._devices if key else self._devices[:1]
                member = self._connect(num_bytes, joined, is_counted=bool(key))
                counts = self.counts if key else Counts()
                run = functools.partial(_exchange, member, joined, counts)
                background = BackgroundThread(
                    "tfdp first gradients", devices, [_ROWS, *specs], specs, run
                )
                finalizers.register(background, member.close)
                self._backgrounds[name] = background
            return self._backgrounds[name]

    def _connect(
        self, num_bytes: int, joined: Collection[int], *, is_counted: bool
    ) -> QuorumMember:
        """Connect all workers to sum tensors; return the endpoint of this worker.

        Args:
            num_bytes: Int, size of the sums of a step in bytes; the larger it is, the
                fewer steps a worker may be late.
            joined: Collection of ints, positions of the tensors that are concatenated,
                not summed.
            is_counted: Bool, whether to assign to `_waiting` the number of sums that
                have arrived before this worker has run their steps.
        """
        extended, name = self._strategy.extended, f"first gradients {next(_names)}"
        connect, group = extended.group.transport.connect, extended.worker_group
        on_change = functools.partial(_set, self._waiting if is_counted else None)
        if group.rank:
            return QuorumFollower(connect(0, name), on_change)
        links = {rank: connect(rank, name) for rank in range(1, group.num_workers)}
        least = group.num_workers - extended.options.backup_workers
        most = max(2, min(_MAX_STEPS, _MAX_BYTES // max(1, num_bytes)))
        return QuorumLeader(links, least, most, joined, on_change)


def _rows() -> tf.Tensor:
    """Return the number of rows of the running replica and of the global batch.

    Returns:
        Float64 tensor of shape `[2]`.
    """
    total = tf.cast(batch_weight.num_samples(), tf.float64)
    return tf.stack([tf.round(batch_weight.current() * total), total])


def _buckets(flat: list) -> list[tuple[int, ...]]:
    """Return the positions of the dense gradients in `flat`, a tuple for each dtype."""
    by_dtype: dict[Any, list[int]] = {}
    for position, gradient in enumerate(flat):
        if not isinstance(gradient, tf.IndexedSlices):
            by_dtype.setdefault(gradient.dtype, []).append(position)
    return [tuple(positions) for positions in by_dtype.values()]


def _joined(
    own: tf.IndexedSlices, values: tf.Tensor, indices: tf.Tensor
) -> tf.IndexedSlices:
    """Return the rows of all workers as a sparse gradient, like that of one device.

    Args:
        own: `tf.IndexedSlices` of the replica, which gives the dense shape; if its
            indices are unique, rows of equal indices are summed.
        values: Tensor of shape `[rows, ...]`, of all workers.
        indices: Integer tensor of shape `[rows]`.
    """
    if are_unique(own.indices):
        indices, values = sum_duplicates(indices, values)
    return tf.IndexedSlices(values, indices, own.dense_shape)


def _set(waiting: Any, number: int) -> None:
    """Assign the number of sums that wait for this worker to the variable `waiting`.

    It does nothing if `waiting` is `None`.
    """
    if waiting is not None:
        waiting.assign(number, read_value=False)


def _exchange(
    member: QuorumMember,
    joined: Collection[int],
    counts: Counts,
    parts: list[list[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Sum gradients over the workers that are in time; runs on a background thread.

    Args:
        member: `QuorumMember` of this worker.
        joined: Collection of ints, positions of the gradients that are concatenated
            over replicas; the others are summed.
        counts: `Counts`, which is updated: with this step, and with the workers whose
            gradients came too late for it.
        parts: List of lists of tensors, for each local replica `[2]`, its rows and
            those of the global batch, followed by its gradients.

    Returns:
        List of lists of tensors, for each local replica the same sums and
        concatenations.
    """
    try:
        share = _share_of(parts, joined)
    except Exception as error:
        # The connections are closed to notify the other workers of the error: otherwise
        # they would wait for this worker's contribution.
        member.close(str(error))
        raise
    result = member.exchange(share)
    counts.steps += 1
    counts.without.update(result.absent)
    with tf.device("CPU:0"):
        sums = [tf.convert_to_tensor(array) for array in result.arrays]
    return [sums] * len(parts)


def _share_of(parts: list[list[tf.Tensor]], joined: Collection[int]) -> Share:
    """Sum local replicas' gradients into this worker's contribution to a step.

    Args:
        parts: List of lists of tensors, for each replica `[2]`, its rows and those of
            the global batch, followed by its gradients.
        joined: Collection of ints, positions of the gradients that are concatenated;
            the others are summed.

    Returns:
        `Share`: the number of rows of these replicas, that of the global batch, and
        the sums or concatenations of the gradients.
    """
    rows = [part[0].numpy() for part in parts]
    columns = zip(*([t.numpy() for t in part[1:]] for part in parts), strict=True)
    arrays = []
    for position, column in enumerate(columns):
        if len(column) == 1:
            arrays.append(column[0])
        elif position in joined:
            arrays.append(np.concatenate(column))
        else:
            arrays.append(np.empty_like(column[0]))
            sum_into(arrays[-1], column)
    own = float(sum(each[0] for each in rows))
    return Share(own, float(rows[0][1]), arrays)
