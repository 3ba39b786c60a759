"""The part of a replica's step that XLA compiles: all but collectives and updates.

    compiled:  forward pass, losses, metrics, backward pass
    then:      gradients -> the path of a step (`tfdp.training.step.path`)

Plain Keras compiles a step on one device as a whole. XLA cannot compile collectives
over the devices of other processes. So the updates are taken out of the step: the rest,
from the forward pass to the logs, is one compiled function, and the updates run after
it. A step that cannot be divided or compiled like this runs without XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import is_collective, step_events
from tfdp.ground import user_code
from tfdp.ground._compat import graphs, keras_optimizer, tf_distribute, xla_lowering
from tfdp.ground.base import batch_weight, deferred_updates, xla
from tfdp.ground.base.batch_weight import BatchWeight
from tfdp.ground.base.deferred_updates import Update
from tfdp.ground.base.loops import Loop
from tfdp.ground.base.xla import CannotCompileError
from tfdp.training.parameters.sharded_parameter import sharded_parameter


@dataclasses.dataclass
class _CompiledPart:
    """The compiled part of a step, and the optimizer updates that run after it.

    Args:
        function: Concrete function that takes the arguments of the step and the tensors
            of a `BatchWeight`, and returns logs and the gradients of each update.
        updates: List of `Update`, those that were taken out of the step.
    """

    function: Any
    updates: list[Update]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Step of a replica: XLA compiles all of it, all but the updates, or nothing.

    Args:
        step: Callable that takes a tuple of arguments and a `BatchWeight` or `None`,
            and returns logs.
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that the step belongs to.
    """

    step: Callable
    strategy: Any
    loop: Loop

    def __call__(self, args: tuple, part: BatchWeight | None) -> Any:
        """Run the step on this thread's replica.

        Args:
            args: Tuple of nested structures of tensors.
            part: `BatchWeight` of the replica, its share of the rows of the global
                batch; or `None` if batches are not weighted.

        Returns:
            The result of `step`.
        """
        numbers = [] if part is None else [part.weight, part.num_samples]
        traced = self._trace_or_warn(args, part, numbers)
        if self.loop.trains:
            self._record_compiled(traced)
        if traced is None:
            return self.step(args, part)
        outputs, gradients = traced.function(args, numbers)
        if not traced.updates:
            return outputs
        ready = tf.nest.flatten(gradients, expand_composites=True)
        first = next((own for own in ready if own is not None), None)
        if first is not None:
            step_events.record_loss(first)
        with batch_weight.use(part):
            for update, own in zip(traced.updates, gradients, strict=True):
                update.apply(_in_backward_order(update, own), update.variables)
        return outputs

    def _record_compiled(self, traced: _CompiledPart | None) -> None:
        """Record for `communication_plan` whether XLA compiles the backward pass.

        Args:
            traced: `_CompiledPart`, the compiled part of the step, or `None` if XLA
                cannot compile it. The loop's model is put into the strategy's
                `compiled_models` if it has updates that run after that part, or else
                removed.
        """
        compiled_models = self.strategy.extended.compiled_models
        if traced is not None and traced.updates:
            compiled_models.add(self.loop.model)
        else:
            compiled_models.discard(self.loop.model)

    def _trace_or_warn(
        self, args: tuple, part: BatchWeight | None, numbers: list
    ) -> _CompiledPart | None:
        """Trace the compiled part of a step; warn and return `None` if XLA cannot.

        Args:
            args: Tuple of nested structures of tensors.
            part: `BatchWeight` of the replica, or `None`.
            numbers: List of the two tensors of `part`; empty without a `BatchWeight`.
        """
        reason = ""
        # On one replica there are no collectives, so the update can be compiled too, as
        # in plain Keras.
        has_one_replica = self.strategy.num_replicas_in_sync == 1
        for is_whole in (True, False) if has_one_replica else (False,):
            try:
                return self._trace(args, part, numbers, is_whole=is_whole)
            except (CannotCompileError, deferred_updates.CannotDeferError) as error:
                reason = str(error)
        name = self.loop.name
        user_code.warn(
            f"`jit_compile=True` is ignored: {reason}. `{name}` runs without XLA.",
            once_for=self.loop.model,
            topic=f"XLA in {name}",
        )
        return None

    def _trace(
        self, args: tuple, part: BatchWeight | None, numbers: list, *, is_whole: bool
    ) -> _CompiledPart:
        """Trace the compiled part of a step.

        Args:
            args: Tuple of nested structures of tensors.
            part: `BatchWeight` of the replica, or `None`.
            numbers: List of the two tensors of `part`, inputs of the compiled function;
                empty without a `BatchWeight`.
            is_whole: Bool, whether the updates are compiled, too. Otherwise they are
                deferred: the function returns their gradients.

        Returns:
            `_CompiledPart`, whose list of updates is empty if `is_whole`.

        Raises:
            CannotCompileError: If XLA cannot compile the step.
            CannotDeferError: If the updates cannot run after the rest of the step.
        """
        _check_inputs(args)
        _check_variables(self.loop.model)
        updates: list[Update] = []

        def compiled(args: tuple, numbers: list) -> Any:
            """Run the step, without the updates unless `is_whole`.

            `numbers` has the weight and the number of samples of `part`, as inputs of
            the compiled function; it is empty without `part`.

            Returns:
                Tuple of the step's result and a list with the gradients of each update
                that was taken out.
            """
            weights = None
            if part is not None:
                weight, num_samples = numbers
                weights = BatchWeight(weight, num_samples)
            if is_whole:
                return self.step(args, weights), []
            with deferred_updates.deferring() as found:
                outputs = self.step(args, weights)
            updates.extend(found)
            return outputs, [update.gradients for update in found]

        concrete = xla.trace(compiled, (args, numbers))
        _check_collectives(concrete.graph)
        _check_order(concrete.graph, updates)
        replica = tf_distribute.local_replica_id(tf.distribute.get_replica_context())
        xla.check(concrete, self.strategy.extended.worker_devices[replica])
        return _CompiledPart(concrete, updates)


def _in_backward_order(update: Update, gradients: list) -> list:
    """Copy gradients in the order in which the backward pass computes them.

    Buckets are filled in the order of the gradients' operations. It must be the same
    with and without XLA, because the layout of sharded state depends on it.

    Args:
        update: `Update` that was taken out, with its gradients in the compiled part.
        gradients: List of the gradients that the compiled part has returned.

    Returns:
        List of the copies, at the positions of `gradients`; `None` stays `None`.
    """
    present = [index for index, own in enumerate(gradients) if own is not None]

    def position(index: int) -> tuple[int, int]:
        """Return the sort key: position of the gradient's last operation, `-index`."""
        traced = update.gradients[index]
        parts = tf.nest.flatten(traced, expand_composites=True)
        return max(map(graphs.op_position, parts)), -index

    ordered = list(gradients)
    for index in sorted(present, key=position):
        ordered[index] = tf.nest.map_structure(
            tf.identity, gradients[index], expand_composites=True
        )
    return ordered


def _check_inputs(args: tuple) -> None:
    """Raise a `CannotCompileError` if a batch has tensors that XLA does not support."""
    for tensor in tf.nest.flatten(args):
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            kind = type(tensor).__name__
            raise CannotCompileError(f"a batch has a `{kind}`, which XLA lacks")
        if tf.is_tensor(tensor) and tensor.dtype == tf.string:
            raise CannotCompileError("a batch has strings, which XLA lacks")


def _check_variables(model: Any) -> None:
    """Raise a `CannotCompileError` if a model has sharded parameters."""
    if any(sharded_parameter(own) is not None for own in model.variables):
        raise CannotCompileError(
            "parameters are sharded, and XLA cannot compile the collectives that "
            "gather them"
        )


def _check_collectives(graph: Any) -> None:
    """Raise a `CannotCompileError` if the compiled part has a collective."""
    for op in xla_lowering.all_operations(graph):
        if is_collective(op):
            raise CannotCompileError(
                "its step has a collective other than those of the gradients (a "
                "synchronized BatchNormalization, `tfdp.all_gather`, or a loss or log "
                f"of the rows of all replicas: operation {op.name!r})"
            )


def _check_order(graph: Any, updates: list[Update]) -> None:
    """Raise if an operation after the first update uses a variable that one changes.

    Args:
        graph: Graph of the compiled part of a step.
        updates: List of `Update`, those that were taken out of the step.

    Raises:
        CannotCompileError: With the name of the operation.
    """
    changed: set[int] = set()
    for update in updates:
        optimizer = update.optimizer
        variables = [*(update.variables or ()), *optimizer.variables]
        changed |= {
            id(tf_distribute.local_part(variable).handle)
            for variable in variables
            if variable is not keras_optimizer.rate_or_schedule(optimizer)
        }
    if not updates:
        return
    for op in graph.get_operations()[updates[0].num_operations :]:
        used = [xla_lowering.outermost(x) for x in op.inputs if x.dtype == tf.resource]
        if changed.intersection(map(id, used)):
            raise CannotCompileError(
                "its `train_step` uses a variable after the update that changes it "
                f"(operation {op.name!r})"
            )
