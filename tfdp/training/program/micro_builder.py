"""Construction of a step with stages that run once and loops over micro-batches."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.training.program.builder import Builder
from tfdp.training.program.facts import Fact, Form
from tfdp.training.program.micro_batches import MicroPlan
from tfdp.training.program.plan import is_conversion
from tfdp.training.program.replica import Rows, slice_along
from tfdp.training.program.view import AS_IS, WHOLE, Need, NeededForm
from tfdp.training.reduction.fusion import wide_dtype


@dataclasses.dataclass(kw_only=True)
class StagedBuilder(Builder):
    """Builder of a program whose rows are computed in micro-batches.

    Args:
        micro: `MicroPlan` of the program.
        num_parts: Scalar int32 tensor, the number of micro-batches; a replica with
            fewer rows computes them one by one.
        begin_changes: Callable without arguments that returns a list of operations,
            which run after all replicas have computed their rows, before states change.
        is_local: Bool, whether all replicas are in this process; if not, the step waits
            for all workers before states change.
    """

    micro: MicroPlan
    num_parts: Any
    begin_changes: Callable[[], list]
    is_local: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        # For each loop, the operation that runs once this replica has computed its
        # rows, and the gate: the operation that guards the results. The caller of `run`
        # lets each gate wait for all local replicas.
        self.gates: list[tuple[tf.Operation, tf.Operation]] = []

    def run(self) -> None:
        """Build the loops over micro-batches, and the stages between that run once.

        The graph of a branch, a loop or a call of the program is built without stages.
        """
        if self.parent is not None:
            super().run()
            return
        with contextlib.ExitStack() as stack:
            for stage, operations in enumerate(self.micro.loops):
                for op in self._of_stage(stage):
                    self.build(op)
                if operations:
                    self._build_micro_batches(stage)
                    gate = self._gate(stage)
                    stack.enter_context(tf.control_dependencies([gate]))
            if not self.is_local:
                # The sum waits for all workers: no worker changes a state while another
                # one can still run out of memory.
                everywhere = self.replica.sum([tf.ones([])])
                stack.enter_context(tf.control_dependencies(everywhere))
            stack.enter_context(tf.control_dependencies(self.begin_changes()))
            # A step that runs out of memory before this last stage can be repeated,
            # because all updates and assignments are in the last stage.
            self._build_with_effects(set(self._of_stage(self.micro.last_stage)))

    def _gate(self, stage: int) -> tf.Operation:
        """Create an operation, the gate of a loop, before which no result is used.

        `run` lets all later operations wait for the gate, and `DividedStep` lets the
        gate wait for the loops of all local replicas. Otherwise a replica could already
        wait in a collective when another one of its process runs out of memory in the
        loop, and the collective would be unusable.

        Args:
            stage: Int, index of the loop over micro-batches, which is that of the stage
                before it.
        """
        results = [self.tensors[id(tensor)] for tensor in self.micro.results[stage]]
        with tf.control_dependencies(results):
            arrived = tf.no_op()
        with tf.control_dependencies([arrived]):
            gate = tf.no_op()
        self.gates.append((arrived, gate))
        return gate

    def _of_stage(self, stage: int) -> list:
        """Return the operations of the stage with this index, in program order.

        A stage runs once: just before the loop with its index, or after all loops.
        """
        return [op for op, own in self.micro.stages.items() if own == stage]

    def _build_operation(self, op: Any) -> None:
        """Build an operation, but replace some reads of states by assigned tensors.

        These reads follow an assignment in the step. States change only after all rows
        are computed, so the reads would return old values, see `MicroPlan.forwarded`.
        """
        if op in self.micro.forwarded:
            assigned, need = self.micro.forwarded[op]
            value = self.get(assigned, need)
            is_part = self.fact(op.outputs[0]).form is Form.PART
            # A read of a state that local replicas share is a partial sum. The assigned
            # value is whole, so every replica but the first returns zeros.
            if is_part and need == WHOLE and self.replica.rank > 0:
                value = tf.zeros_like(value)
            self._store(op.outputs[0], value)
        else:
            super()._build_operation(op)

    def _build_micro_batches(self, stage: int) -> None:
        """Build the loop over the micro-batches of this replica that follows a stage.

        The combined results of the loop are stored as this replica's tensors.
        """
        returned = self.micro.results[stage]
        own = tf.cast(self.replica.rows.own, tf.int32)
        count = tf.maximum(tf.minimum(self.num_parts, own), 1)
        joins = [_Join(tensor, self.fact(tensor), count) for tensor in returned]

        def body(index: tf.Tensor, *totals: Any) -> list:
            """Build one micro-batch; return the next index and the new totals."""
            builder = self._of_micro_batch(index, count)
            for op in self.micro.loops[stage]:
                builder.build(op)
            return [
                index + 1,
                *(
                    join.add(total, index, builder.get(join.tensor, AS_IS))
                    for join, total in zip(joins, totals, strict=True)
                ),
            ]

        results = tf.while_loop(
            lambda index, *_: index < count,
            body,
            [tf.constant(0), *(join.start() for join in joins)],
            shape_invariants=[tf.TensorShape([]), *(join.invariant for join in joins)],
            # Micro-batches run one after another, so that each one begins when the
            # memory of the previous one is free.
            parallel_iterations=1,
        )
        for join, result in zip(joins, results[1:], strict=True):
            self._store(join.tensor, join.end(result))

    def _of_micro_batch(self, index: tf.Tensor, count: tf.Tensor) -> MicroBatchBuilder:
        """Return the builder of one micro-batch.

        Args:
            index: Scalar int32 tensor, number of micro-batches before it.
            count: Scalar int32 tensor, number of micro-batches of this replica.
        """
        rows = self.replica.rows
        least, extra = rows.own // count, rows.own % count
        begin = index * least + tf.minimum(index, extra)
        part = Rows(
            least + tf.cast(index < extra, tf.int32),
            rows.first + begin,
            rows.total,
            rows.may_be_empty,
            rows.total_may_be_zero,
        )
        return MicroBatchBuilder(
            self.trace,
            self.plan,
            self.scope,
            self.replica.for_micro_batch(part, index),
            tensors={},
            micro=self.micro,
            around=self,
            begin=begin,
        )


@dataclasses.dataclass(kw_only=True)
class MicroBatchBuilder(Builder):
    """Builder of the operations of one micro-batch, inside a loop over all of them.

    Args:
        micro: `MicroPlan` of the program.
        around: `StagedBuilder`, which has the tensors outside of the loop.
        begin: Scalar int32 tensor, number of the replica's rows before this
            micro-batch.
    """

    micro: MicroPlan
    around: StagedBuilder
    begin: Any

    def get(self, tensor: Any, need: Need = AS_IS) -> Any:
        """Return this micro-batch's value of a tensor, in a needed form.

        A tensor that is needed whole, but that replicas hold in parts, is returned for
        the whole batch, from outside of the loop. See `Builder.get`.
        """
        is_total = need.kind is NeededForm.WHOLE and self.parent is None
        if is_total and is_conversion(self.fact(tensor), need):
            return self.around.get(tensor, WHOLE)
        return super().get(tensor, need)

    def multiple(self, tensor: Any) -> Any:
        """Return how many entries a tensor has along its axis of rows for each row.

        Replicas do not communicate in the loop, so an unknown number is computed from
        this micro-batch alone.

        Returns:
            Int if it is known before the step runs, or else a scalar int32 tensor. The
            latter is 1 in a micro-batch without rows.
        """
        known = self.fact(tensor).multiple
        if known is not None:
            return known
        entries = tf.shape(self.get(tensor, AS_IS))[self.fact(tensor).axis]
        return tf.maximum(entries // tf.maximum(self.own_rows, 1), 1)

    def _own_value(self, tensor: Any) -> Any:
        """Return this micro-batch's value of a tensor, without a conversion.

        If the rows of the tensor are computed outside of the loop, it is a slice of
        them.
        """
        is_here = (
            self.parent is not None
            or tensor.op in self.micro.inside
            or self.micro.is_built_per_stage(tensor.op)
        )
        if is_here or id(tensor) in self.tensors:
            return super()._own_value(tensor)
        value = self.around.get(tensor, AS_IS)
        fact = self.fact(tensor)
        if fact.is_rows:
            multiple = self.around.multiple(tensor)
            begin, size = self.begin * multiple, self.own_rows * multiple
            value = slice_along(value, fact.axis, begin, size)
            value.set_shape(self.own_static_shape(tensor, fact))
        self.tensors[id(tensor)] = value
        return value


class _Join:
    """Combination of a tensor's values of all micro-batches, within a loop.

    Rows are concatenated and partial sums added; a tensor that is the same on all
    replicas has the value of the last micro-batch.

    Args:
        tensor: Tensor of the program.
        fact: `Fact` of the tensor: whether it has rows, is a partial sum, or neither.
        count: Scalar int tensor, number of micro-batches.
    """

    def __init__(self, tensor: Any, fact: Fact, count: tf.Tensor) -> None:
        self.tensor, self._fact, self._count = tensor, fact, count
        is_bool = tensor.dtype == tf.bool
        self._dtype = tf.int32 if is_bool else wide_dtype(tensor.dtype)

    @property
    def invariant(self) -> tf.TensorShape:
        """Static shape that the combined value has in every iteration of the loop."""
        shape = self.tensor.shape
        is_known = shape.is_fully_defined() and not self._fact.is_rows
        return shape if is_known else tf.TensorShape(None)

    def start(self) -> Any:
        """Return the initial value of the loop: an empty `TensorArray`, or zeros."""
        if self._fact.is_rows:
            return tf.TensorArray(
                self.tensor.dtype,
                size=self._count,
                infer_shape=False,
                element_shape=[None, *self.tensor.shape[1:]],
            )
        # A scalar zero stands in for an unknown shape: it broadcasts to the addends.
        shape = self.tensor.shape if self.tensor.shape.is_fully_defined() else []
        return tf.zeros(shape, self._dtype)

    def add(self, total: Any, index: tf.Tensor, value: tf.Tensor) -> Any:
        """Return the combined value after one more micro-batch.

        Args:
            total: `TensorArray` or tensor, the combined value of earlier micro-batches.
            index: Scalar int32 tensor, number of micro-batches before this one.
            value: Tensor, the value of this micro-batch.

        Returns:
            `TensorArray` or tensor, like `total`.
        """
        if self._fact.is_rows:
            return total.write(index, value)
        added = tf.cast(value, self._dtype)
        # `tf.while_loop` refuses a value whose static shape is less exact than its
        # invariant, and TensorFlow may know less of the shape within a micro-batch.
        added.set_shape(self.invariant)
        return total + added if self._fact.form is Form.PART else added

    def end(self, total: Any) -> tf.Tensor:
        """Return the combined value as a tensor, in the program's dtype."""
        if not self._fact.is_rows:
            whole = tf.identity(tf.cast(total, self.tensor.dtype))
            whole.set_shape(self.tensor.shape)
            return whole
        rows = total.concat()
        rows.set_shape([None, *self.tensor.shape[1:]])
        return rows
