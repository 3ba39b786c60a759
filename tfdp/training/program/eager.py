"""A step that runs eagerly on the rows of all replicas, as on one device.

    rows of all workers -> the step, on the first replica of each worker
      -> its gradients, counted once -> updates on every replica

With `run_eagerly=True` there is no traced program that could be divided. The mode is
for debugging: a step may be any Python code and has to be correct, but may be slow.

A job is a part of the step that runs on every replica, such as an update: the first
local replica records it as a tuple of tensors, a callable, and the kind of an `Effect`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.communication.collectives.gather import gather_first_axis
from tfdp.ground.base import batch_weight
from tfdp.ground.base.batch_weight import BatchWeight
from tfdp.ground.base.program_trace import ProgramTrace, tracing
from tfdp.training.data.rows import first_tensor, join_rows, num_rows, take_rows
from tfdp.training.reduction.training_group import TrainingGroup, training_group


class EagerProgram(ProgramTrace):
    """A single-device step that runs eagerly on one replica, on behalf of several.

    Args:
        row_counts: List of ints, number of rows of each replica of the program.
        contributes: Bool, whether its gradients and metrics are counted. All workers
            compute the same ones, so only those of one worker are counted.
    """

    is_eager = True

    def __init__(self, row_counts: list[int], *, contributes: bool) -> None:
        super().__init__(None)
        self.row_counts = row_counts
        self.contributes = contributes
        self.result: Any = None
        self.jobs: list[tuple] = []
        self._assigned: dict[int, Any] = {}

    def add(
        self, tensors: Sequence[Any], run: Callable[[list], None], kind: str = "whole"
    ) -> None:
        """Run an action of the step, such as an update, and record it.

        The other local replicas then repeat it.

        Args:
            tensors: Sequence of tensors that the action needs.
            run: Callable that takes these tensors, such as an update by the optimizer.
            kind: String, as in `Effect`: `"parts"` for gradients, `"whole"`, or `"as
                is"` for an action that is not recorded. Defaults to `"whole"`.

        Raises:
            ValueError: If a `tf.function` in the step makes the update.
        """
        if kind == "as is":
            run(list(tensors))
            return
        if not tf.executing_eagerly():
            raise ValueError(
                "With `run_eagerly=True` a `tf.function` of the step makes an update. "
                "Call the function without the decorator, or remove "
                "`run_eagerly=True`."
            )
        self.jobs.append((list(tensors), run, kind))
        self.run_job(self.jobs[-1], contributes=self.contributes)

    @staticmethod
    def run_job(job: tuple, *, contributes: bool) -> None:
        """Run, on the running replica, an action that `add` has recorded.

        Args:
            job: Tuple of tensors, a callable that takes the tensors, and the kind of
                the `Effect`.
            contributes: Bool; if false, gradients are replaced by zeros, since another
                replica contributes them.
        """
        tensors, run, kind = job
        if kind == "parts" and not contributes:
            tensors = [_empty_gradient_like(tensor) for tensor in tensors]
        with tracing(None):
            run(tensors)

    def record_assigned(self, variable: Any) -> None:
        """Register a distributed variable that the step has assigned.

        `copy_assigned` then copies its value to the other local replicas.
        """
        self._assigned[id(variable)] = variable

    def copy_assigned(self, replica: int) -> None:
        """Copy the variables that the first local replica has assigned.

        `replica` is the local index of the replica to which they are copied.
        """
        for variable in self._assigned.values():
            first, *_ = variable.values
            variable.values[replica].assign(first.read_value())


@dataclasses.dataclass(eq=False)
class EagerStep:
    """A step that Keras passes to `strategy.run`, run eagerly on all rows.

    Args:
        strategy: A tfdp strategy.
        function: Callable, the step, written for one device.
        parts: List of the `BatchWeight` of each local replica, its fraction of samples.
        local: List of nests, the arguments of each local replica.
        workers: `ProcessGroup` of the workers that have the rows.
        states: List of `MetricVariable`s, the states of the model's metrics.
        returns_rows: Bool, whether the step returns rows, as in `predict`, or logs.
    """

    strategy: Any
    function: Callable
    parts: list[BatchWeight]
    local: list
    workers: ProcessGroup
    states: list
    returns_rows: bool
    _program: EagerProgram | None = None

    @functools.cached_property
    def _whole(self) -> tuple:
        """Pair of the step's arguments with all rows, and each replica's row count.

        The first access gathers the rows of all workers.
        """
        counts = [_num_rows(args) for args in self.local]
        rank = self.strategy.extended.worker_group.rank
        join = functools.partial(_join_rows, workers=self.workers, rank=rank)
        args = tf.nest.map_structure(lambda *own: join(own), *self.local)
        return args, join([tf.constant(counts)]).numpy().tolist()

    def prepare(self) -> None:
        """Gather the global batch; merge metrics' states on the first local replica.

        The states of the other local replicas are set to zero.
        """
        self._whole  # the first access of a cached property gathers  # noqa: B018
        merged = self.strategy.extended.merge_metric_variables(self.states)
        for variable, value in zip(self.states, merged, strict=True):
            for replica, component in enumerate(variable.values):
                is_first = replica == 0
                component.assign(value if is_first else tf.zeros_like(value))

    def __call__(self, *args: Any) -> Any:
        """Run the step on the running replica.

        `args` are the replica's arguments. They are used only if its group has one
        replica; otherwise the step takes the rows of all replicas from `local`.

        Returns:
            The step's result: with `returns_rows` the rows of the running replica,
            else the logs.
        """
        group = training_group(self.strategy)
        with batch_weight.use(self.parts[group.replica]):
            if group.size == 1:
                return self._run(
                    EagerProgram([_num_rows(args)], contributes=True), args
                )
            if group.replica == 0:
                whole, row_counts = self._whole
                self._program = EagerProgram(row_counts, contributes=group.rank == 0)
                self._program.result = self._run(self._program, whole)
            else:
                self._follow(group)
        return self._own_result(group)

    def _run(self, program: EagerProgram, args: tuple) -> Any:
        """Run the step as an eager program, and return its result.

        If `program.contributes` is false, another worker's metrics count, so the states
        of this worker's metrics are set to zero after the step.

        Args:
            program: `EagerProgram` that records the updates of the step.
            args: Tuple, the arguments of the step.
        """
        with tracing(program):
            result = self.function(*args)
        if not program.contributes:
            # All workers have updated their metrics with the same rows, which must
            # count once. So the metric states of all workers but the first are set to
            # zero.
            for variable in self.states:
                component = variable.values[0]
                component.assign(tf.zeros_like(component))
        return result

    def _follow(self, group: TrainingGroup) -> None:
        """Repeat the updates of the first local replica on the running one.

        Then copy the variables that the step has assigned from the first local replica.

        Args:
            group: `TrainingGroup` of the running replica.
        """
        program = self._program
        assert program is not None
        # The list of jobs grows during this loop. Whenever a job waits in a collective
        # for the first local replica, that replica's thread runs and appends the next.
        for job in program.jobs:
            program.run_job(job, contributes=False)
        program.copy_assigned(group.replica)

    def _own_result(self, group: TrainingGroup) -> Any:
        """Return the step's result for the running replica.

        These are its own rows if `returns_rows`, or else the logs over all rows.

        Args:
            group: `TrainingGroup` of the running replica, with its rank.
        """
        assert self._program is not None
        result, counts = self._program.result, self._program.row_counts
        if not self.returns_rows:
            return result
        begin = tf.constant(sum(counts[: group.rank]), tf.int64)
        size = tf.constant(counts[group.rank], tf.int64)
        return tf.nest.map_structure(
            lambda rows: (
                take_rows(rows, begin, size)
                if tf.is_tensor(rows) and rows.shape.rank
                else rows
            ),
            result,
        )


def _empty_gradient_like(gradient: Any) -> Any:
    """Return zeros like a dense gradient, no rows like a sparse one, or `None`."""
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = gradient.values[:0], gradient.indices[:0]
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return None if gradient is None else tf.zeros_like(gradient)


def _num_rows(args: Any) -> int:
    """Return the number of rows of the first tensor in a step's arguments, else 0."""
    first = first_tensor(args)
    return 0 if first is None else int(num_rows(first))


def _join_rows(parts: Sequence[Any], workers: ProcessGroup, rank: int) -> Any:
    """Concatenate the rows of the local replicas, and then those of all workers.

    Args:
        parts: Sequence of tensors or other values, one for each local replica.
        workers: `ProcessGroup` of the workers that have the rows.
        rank: Int, rank of this worker.

    Returns:
        Tensor with the rows of all replicas. If the parts are scalars, or no tensors,
        the first one of them.
    """
    first, *_ = parts
    if not tf.is_tensor(first) or first.shape.rank == 0:
        return first
    own = join_rows(list(parts))
    if workers.size == 1:
        return own
    gathered = [
        _all_gather(component, workers, rank)
        for component in tf.nest.flatten(own, expand_composites=True)
    ]
    return join_rows(
        [
            tf.nest.pack_sequence_as(own, components, expand_composites=True)
            for components in zip(*gathered, strict=True)
        ]
    )


def _all_gather(tensor: tf.Tensor, workers: ProcessGroup, rank: int) -> list[tf.Tensor]:
    """All-gather an eager tensor of any shape from workers; return a list by rank."""
    own = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    joined, counts = gather_first_axis(own, workers, 0, rank)
    serialized, tensors = joined.numpy().tobytes(), []
    for size in counts.numpy():
        tensors.append(tf.io.parse_tensor(serialized[:size], tensor.dtype))
        serialized = serialized[size:]
    return tensors
