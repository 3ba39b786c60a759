"""A step that runs eagerly: on the rows of all replicas, as one device runs it.

    rows of all workers -> the step, on the first replica of each worker
      -> its gradients, counted once -> updates on every replica

With `run_eagerly=True` no program is traced that could be divided. The mode is for
debugging, where a step has to be right, whatever Python it is, and may take its time.
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
from tfdp.training.data.rows import first_tensor, num_rows
from tfdp.training.reduction.training_group import TrainingGroup, training_group


class EagerProgram(ProgramTrace):
    """A step of one device that runs eagerly on one replica for several.

    Args:
        row_counts: List of ints, the rows of each replica of the program.
        gives: Bool, whether its gradients and metrics count: those of one worker do.
    """

    is_eager = True

    def __init__(self, row_counts: list[int], *, gives: bool) -> None:
        super().__init__(None)
        self.row_counts = row_counts
        self.gives = gives
        self.result: Any = None
        self.jobs: list[tuple] = []
        self._assigned: dict[int, Any] = {}

    def add(
        self, tensors: Sequence[Any], run: Callable[[list], None], kind: str = "whole"
    ) -> None:
        """Do now what each replica does at this place of the program."""
        if kind == "as held":
            run(list(tensors))
            return
        if not tf.executing_eagerly():
            raise ValueError(
                "With `run_eagerly=True` a `tf.function` of the step makes an update. "
                "Call the function without the decorator, or leave out "
                "`run_eagerly=True`."
            )
        self.jobs.append((list(tensors), run, kind))
        self.do(self.jobs[-1], gives=self.gives)

    @staticmethod
    def do(job: tuple, *, gives: bool) -> None:
        """Do what one replica has to do.

        Args:
            job: Tuple of tensors, a callable of them, and a kind, see `Effect`.
            gives: Bool, whether gradients are this replica's, or zeros.
        """
        tensors, run, kind = job
        if kind == "parts" and not gives:
            tensors = [_nothing_of(tensor) for tensor in tensors]
        with tracing(None):
            run(tensors)

    def note_assigned(self, variable: Any) -> None:
        """Note that the step has assigned a variable that all replicas have."""
        self._assigned[id(variable)] = variable

    def copy_assigned(self, replica: int) -> None:
        """Give a local replica what the first one has assigned."""
        for variable in self._assigned.values():
            first, *_ = variable.values
            variable.values[replica].assign(first.read_value())


@dataclasses.dataclass(eq=False)
class EagerStep:
    """A step that Keras gives to `strategy.run`, run eagerly on all rows.

    Args:
        strategy: A tfdp strategy.
        function: Callable, the step, as on one device.
        parts: List of `BatchWeight`, one for each local replica.
        local: List of nests, what each local replica is given.
        workers: `ProcessGroup` of the workers that have the rows.
        states: List of `MetricVariable`s, the states of the model's metrics.
        returns_rows: Bool, whether it returns rows, as `predict` does, or logs.
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
        """The arguments with the rows of all, and the rows of each replica."""
        counts = [_num_rows(args) for args in self.local]
        rank = self.strategy.extended.worker_group.rank
        join = functools.partial(_joined, workers=self.workers, rank=rank)
        args = tf.nest.map_structure(lambda *own: join(own), *self.local)
        return args, join([tf.constant(counts)]).numpy().tolist()

    def prepare(self) -> None:
        """Give the first replica of each worker what one device would have."""
        self._whole  # noqa: B018
        merged = self.strategy.extended.merge_metric_variables(self.states)
        for variable, value in zip(self.states, merged, strict=True):
            for replica, component in enumerate(variable.values):
                is_first = replica == 0
                component.assign(value if is_first else tf.zeros_like(value))

    def __call__(self, *args: Any) -> Any:
        """Run the step of the replica that runs."""
        group = training_group(self.strategy)
        with batch_weight.use(self.parts[group.replica]):
            if group.size == 1:
                return self._run(EagerProgram([_num_rows(args)], gives=True), args)
            if group.replica == 0:
                whole, row_counts = self._whole
                self._program = EagerProgram(row_counts, gives=group.rank == 0)
                self._program.result = self._run(self._program, whole)
            else:
                self._follow(group)
        return self._own(group)

    def _run(self, program: EagerProgram, args: tuple) -> Any:
        with tracing(program):
            result = self.function(*args)
        if not program.gives:
            # They count once, on the first worker.
            for variable in self.states:
                component = variable.values[0]
                component.assign(tf.zeros_like(component))
        return result

    def _follow(self, group: TrainingGroup) -> None:
        """Do what the first replica has done, which runs until it needs this one."""
        program = self._program
        assert program is not None
        for job in program.jobs:  # to which it adds
            program.do(job, gives=False)
        program.copy_assigned(group.replica)

    def _own(self, group: TrainingGroup) -> Any:
        """Return the logs, or the rows of this replica."""
        assert self._program is not None
        result, counts = self._program.result, self._program.row_counts
        if not self.returns_rows:
            return result
        begin = sum(counts[: group.rank])
        own = slice(begin, begin + counts[group.rank])
        return tf.nest.map_structure(
            lambda rows: rows[own] if tf.is_tensor(rows) and rows.shape.rank else rows,
            result,
        )


def _nothing_of(gradient: Any) -> Any:
    """Return a gradient like another one, that adds nothing to it."""
    if isinstance(gradient, tf.IndexedSlices):
        values, indices = gradient.values[:0], gradient.indices[:0]
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return None if gradient is None else tf.zeros_like(gradient)


def _num_rows(args: Any) -> int:
    first = first_tensor(args)
    return 0 if first is None else int(num_rows(first))


def _joined(parts: Sequence[Any], workers: ProcessGroup, rank: int) -> Any:
    """Join the rows of the local replicas, and of all workers."""
    first, *_ = parts
    if not tf.is_tensor(first) or first.shape.rank == 0:
        return first
    own = _concatenated(list(parts))
    if workers.size == 1:
        return own
    found = [
        _gathered(component, workers, rank)
        for component in tf.nest.flatten(own, expand_composites=True)
    ]
    return _concatenated(
        [
            tf.nest.pack_sequence_as(own, components, expand_composites=True)
            for components in zip(*found, strict=True)
        ]
    )


def _concatenated(parts: list) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts, expand_nonconcat_dims=True)
    return tf.concat(parts, axis=0)


def _gathered(tensor: tf.Tensor, workers: ProcessGroup, rank: int) -> list[tf.Tensor]:
    """Return a tensor of any type and shape as each worker has it."""
    own = tf.io.decode_raw(tf.io.serialize_tensor(tensor), tf.uint8)
    joined, counts = gather_first_axis(own, workers, 0, rank)
    text, found = joined.numpy().tobytes(), []
    for size in counts.numpy():
        found.append(tf.io.parse_tensor(text[:size], tensor.dtype))
        text = text[size:]
    return found
