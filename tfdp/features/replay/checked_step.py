"""Digests of what replicas compute in a step, compared before the update.

First each replica stands in for the next one: it computes that replica's rows, and the
step changes nothing. Then all compute their own rows. The update is made only if both
computations have the same bits, and all replicas have received the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives.gather import gather_first_axis
from tfdp.features.replay.replay_group import replay_group
from tfdp.ground._compat import optimizer_state, runtime, tf_distribute
from tfdp.training.data.batch_weights import CountedBatch
from tfdp.training.reduction.fusion import ReducedGradients
from tfdp.training.reduction.training_group import TrainingGroup, training_group
from tfdp.training.replicas.checksum import checksums, combine_checksums
from tfdp.training.step.accumulation import Totals
from tfdp.training.step.state_layout import GradientStatistics, StateLayout
from tfdp.training.step.step import LoopFeature, Step
from tfdp.training.step.undo import changed_outside_update, undo_after


class CheckedStep(LoopFeature):
    """Hooks of a step in which two replicas compute the same rows, to compare digests.

    The step runs twice: first each replica stands in for the replica of the next rank
    and computes its rows, then its own.

    Args:
        strategy: A tfdp strategy of several replicas.

    Attributes:
        is_stand_in: Bool, whether each replica computes the rows of the next one.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._host = strategy.extended.host_group.devices[0]
        num_local = strategy.extended.num_local
        self.is_stand_in = False
        # Digests `[num_digests]` that each local replica computed as a stand-in, from
        # the next replica's rows, stored until its own run of the step compares them.
        self._as_stand_in = [self._variable([None]) for _ in range(num_local)]
        # Digests of all replicas, stored so that the host can read them after the step.
        # `_computed`, `[num_replicas, 2 * num_digests]`: from their own rows, followed
        # by those as stand-ins. `_received`, `[num_replicas]`: of the sums received.
        self._computed = [self._variable([None, None]) for _ in range(num_local)]
        self._received = [self._variable([None]) for _ in range(num_local)]
        # For each local replica of the step being traced: digests of the tensors that
        # it gives to collectives, which `admit` compares; and its number of updates,
        # since a second update is an error.
        self._given: list[list[tf.Tensor]] = [[] for _ in range(num_local)]
        self._num_updates = [0] * num_local
        self._graph: Any = None

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the digests of the last step.

        Returns:
            Tuple of two arrays of ints. The first has the digests of what replicas have
            computed, `[2, num_replicas, num_digests]`: from their own rows, and as
            stand-ins. The second has the digests of the sums that they have received,
            `[num_replicas]`, or `[0]` if nothing was summed.
        """
        computed, received = (
            _read(variables[0]).numpy()
            for variables in (self._computed, self._received)
        )
        return np.stack(np.split(computed, 2, axis=1)), received

    def replace_batch(self, args: tuple) -> tuple:
        """Implements `LoopFeature.replace_batch`: choose each local replica's rows.

        Returns `args`, the arguments of the step, with the rows of each replica or, if
        `is_stand_in`, those of the next replica.
        """
        return tuple(
            CountedBatch(self._taken(arg.batch), arg.num_rows)
            if isinstance(arg, CountedBatch)
            else self._taken(arg)
            for arg in args
        )

    def _taken(self, batch: Any) -> Any:
        """Return a nest like `batch`, of the rows that the local replicas compute."""
        return tf.nest.map_structure(self._taken_part, batch)

    def _taken_part(self, part: Any) -> Any:
        """Return the rows that the local replicas compute of a part of a batch.

        Args:
            part: `PerReplica` of the rows of each local replica, or the rows of the
                only one; a leaf of the nest of a batch.

        Returns:
            Like `part`: the same rows, or those of the next replicas if `is_stand_in`.
        """
        is_divided = isinstance(part, tf_distribute.PerReplica)
        own = [_with_any_rows(rows) for rows in (part.values if is_divided else [part])]
        if self.is_stand_in:
            own = [*own[1:], self._of_next_worker(own[0])]
        return tf_distribute.PerReplica(own) if is_divided else own[0]

    def _of_next_worker(self, rows: Any) -> Any:
        """Return the rows of the next worker's first replica, by an all-gather.

        `rows` are those of this worker's first replica. They are returned unchanged
        with one worker, and if they are a scalar or no array.

        Raises:
            ValueError: If the rows are not dense tensors of numbers.
        """
        group = self._strategy.extended.host_group
        if group.size == 1 or not _has_rows(rows):
            return rows
        if not tf.is_tensor(rows) or rows.dtype == tf.string:
            raise ValueError(
                "`ConsistencyCheck(replay=...)` sends rows to another worker, which "
                f"must be dense tensors of numbers. Received: {rows!r}. Remove "
                "`replay`."
            )
        rank = self._strategy.extended.worker_group.rank
        following = (rank + 1) % group.size
        counts, _ = gather_first_axis(tf.shape(rows)[:1], group, 0, rank)
        joined, _ = gather_first_axis(rows, group, 0, rank)
        begin = tf.reduce_sum(counts[:following])
        return joined[begin : begin + counts[following]]

    def regroup(self, group: TrainingGroup) -> TrainingGroup:
        """Implements `LoopFeature.regroup`: record digests of what replicas send.

        Returns:
            `ReplayGroup` of the same replicas, in which a digest of each tensor that
            the running replica gives to a collective is recorded. If `is_stand_in`, its
            replicas have the ranks of the next ones.
        """
        given, graph = self._given[group.replica], self._graph

        def record(tensor: tf.Tensor) -> None:
            """Append the digest of a tensor that the replica gives to a collective."""
            if tf.compat.v1.get_default_graph() is graph:
                given.append(_digest([tensor]))

        return replay_group(group, record, is_stand_in=self.is_stand_in)

    def around_step(self, model: Any) -> Callable[[], None]:
        """Reset the digests of the running replica before its step.

        Implements `StepFeature.around_step`.

        Returns:
            Callable for the end of the step. If `is_stand_in`, or if digests differ, it
            undoes what the step changed besides its update, such as metrics.
        """
        replica = _local_replica()
        self._graph = tf.compat.v1.get_default_graph()
        self._given[replica].clear()
        self._num_updates[replica] = 0
        self._assign(self._computed[replica], tf.zeros([1, 0], tf.int64))
        self._assign(self._received[replica], tf.zeros([0], tf.int64))
        variables = [*changed_outside_update(model), *_sums_of(model.optimizer)]
        return undo_after(variables, lambda: self._is_undone(replica))

    def _is_undone(self, replica: int) -> tf.Tensor:
        """Return whether to undo what a step changed besides its update.

        If so, the callable of `around_step` restores metrics and statistics of
        BatchNormalization, for example.

        Args:
            replica: Int, index of the replica among the local ones.

        Returns:
            Scalar bool tensor, true if `is_stand_in` or if digests differ.
        """
        if self.is_stand_in:
            return tf.constant(True)
        computed = _are_alike(_read(self._computed[replica]))
        return ~(computed & _are_equal(_read(self._received[replica])))

    def admit(self, gradients: Sequence[Any] | None) -> tf.Tensor | bool:
        """Implements `StepFeature.admit`: compare what replicas and stand-ins computed.

        Their digests are stored for `read`; those of a stand-in, until its own run.

        Args:
            gradients: Sequence of this replica's gradients of the micro-batch, or
                `None` in an update with the accumulated ones.

        Returns:
            Scalar bool tensor, whether they agree and the update may be made; `False`
            if `is_stand_in`; `True` if `gradients` is `None`: there are no new ones.

        Raises:
            ValueError: At a second update in a step.
        """
        if gradients is None:
            return True
        replica = _local_replica()
        self._num_updates[replica] += 1
        if self._num_updates[replica] > 1:
            raise ValueError(
                "`ConsistencyCheck(replay=...)` needs a `train_step` with one update. "
                "Received: a second call of `apply`. Remove `replay`."
            )
        own = tf.stack([*self._given[replica], _digest(gradients)])
        if self.is_stand_in:
            self._assign(self._as_stand_in[replica], own)
            return False
        others = tf.ensure_shape(_read(self._as_stand_in[replica]), own.shape)
        group = training_group(self._strategy)
        computed = group.gather(tf.concat([own, others], 0)[tf.newaxis])
        self._assign(self._computed[replica], computed)
        return _are_alike(computed)

    def examine(
        self,
        step: Step,
        totals: Totals,
        divisor: tf.Tensor | None,
        statistics: GradientStatistics,
    ) -> tf.Tensor | None:
        """Implements `StepFeature.examine`: compare the sums that replicas received.

        Their digests are stored for `read`.

        Args:
            step: `Step`.
            totals: `Totals` of this replica; not used.
            divisor: Scalar float64 tensor, or `None`; not used.
            statistics: `GradientStatistics` of the reduced gradients, whose sums are
                compared.

        Returns:
            Scalar bool tensor, whether all replicas have received the same sums of
            gradients; `None` with sharded state, where each receives other sums.
        """
        if type(step.layout) is not StateLayout:
            return None
        digest = _digest([part for item in statistics.sums for part in _parts(item)])
        received = training_group(self._strategy).gather(digest[tf.newaxis])
        self._assign(self._received[_local_replica()], received)
        return _are_equal(received)

    def _variable(self, shape: list) -> Any:
        """Create an int64 `tf.Variable` for digests on the host, empty at first.

        Args:
            shape: List of ints, or `None` for a size that may change.
        """
        empty = np.zeros([size or 0 for size in shape], np.int64)
        return runtime.plain_variable(empty, tf.int64, self._host, shape)

    def _assign(self, variable: Any, value: tf.Tensor) -> None:
        """Assign digests to a variable on the host."""
        with tf.device(self._host):
            variable.assign(value, read_value=False)


def _read(variable: Any) -> tf.Tensor:
    """Return the digests that a variable stores, an int64 tensor of its shape."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.int64)


def _are_alike(computed: tf.Tensor) -> tf.Tensor:
    """Return whether all replicas have computed the same digests as their stand-ins.

    Args:
        computed: Tensor of shape `[num_replicas, 2 * num_digests]`: digests of a
            replica's own rows, then those as a stand-in for the next replica.

    Returns:
        Scalar bool tensor.
    """
    own, others = tf.split(computed, 2, axis=1)
    return tf.reduce_all(own == tf.roll(others, 1, 0))


def _are_equal(received: tf.Tensor) -> tf.Tensor:
    """Return whether all replicas have received the same sums, a scalar bool tensor.

    `received` has the digest of each replica's sums, gathered before: `[num_replicas]`.
    """
    return tf.reduce_all(received == received[:1])


def _local_replica() -> int:
    """Return the index of the running replica among those of this process."""
    return tf_distribute.local_replica_id(tf.distribute.get_replica_context())


def _sums_of(optimizer: Any) -> list:
    """Return a list of variables that an optimizer's step changes without an update.

    They are the sums of gradients and losses over micro-batches, and the variables of
    active features.
    """
    features = getattr(optimizer, "features", None)
    if features is None:
        accumulates = bool(optimizer.gradient_accumulation_steps)
        return optimizer_state.accumulators(optimizer) if accumulates else []
    accumulation = features.accumulation
    found = [] if accumulation is None else list(accumulation.variables)
    found += [] if features.loss_sum is None else [features.loss_sum]
    return found + [v for item in features.active for v in item.variables]


def _has_rows(part: Any) -> bool:
    """Return whether a leaf of a batch has rows: it has a shape, and is no scalar."""
    shape = getattr(part, "shape", None)
    return shape is not None and shape.rank != 0


def _with_any_rows(rows: Any) -> Any:
    """Return a tensor whose static shape leaves the number of rows unknown.

    The number may differ between replicas, and TensorFlow may choose other kernels for
    another static shape.
    """
    if not tf.is_tensor(rows) or isinstance(rows, tf.SparseTensor | tf.RaggedTensor):
        return rows
    if not rows.shape.rank:
        return rows
    return tf.raw_ops.PlaceholderWithDefault(
        input=rows, shape=tf.TensorShape([None, *rows.shape[1:]])
    )


def _parts(item: Any) -> list:
    """Return the tensors and `tf.IndexedSlices` of reduced gradients.

    Args:
        item: Result of `StateLayout.reduce` for a parameter group.

    Returns:
        List: of `ReducedGradients` the flat tensor of each bucket, then the sparse
        gradients; otherwise a gradient for each variable.
    """
    if isinstance(item, ReducedGradients):
        return [*item.flats, *item.sparse.values()]
    return item.gradients()


def _digest(values: Sequence[Any]) -> tf.Tensor:
    """Return a scalar int64 digest of the bits of tensors and `tf.IndexedSlices`."""
    parts = tf.nest.flatten(list(values), expand_composites=True)
    known = [part for part in parts if part.shape.is_fully_defined()]
    total = combine_checksums(checksums(known)) if known else tf.zeros([], tf.int64)
    for part in parts:
        if not part.shape.is_fully_defined():
            total = 31 * total + _digest_of_rows(part)
    return total


def _digest_of_rows(rows: tf.Tensor) -> tf.Tensor:
    """Return one int64 digest of all elements of a tensor of any shape, a scalar.

    It is a sum with odd factors that may wrap around. Odd factors can be inverted
    modulo `2**64`, so a change of one word always changes the digest.
    """
    if rows.dtype == tf.bool:
        rows = tf.cast(rows, tf.uint8)
    kind = {1: tf.uint8, 2: tf.uint16}.get(rows.dtype.size, tf.int32)
    words = tf.reshape(tf.bitcast(tf.reshape(rows, [-1]), kind), [-1])
    factors = 2 * tf.range(tf.size(words, tf.int64), dtype=tf.int64) + 1
    return tf.reduce_sum(tf.cast(words, tf.int64) * factors * 0x9E3779B1)
