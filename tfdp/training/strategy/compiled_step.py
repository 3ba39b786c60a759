"""The part of a replica's step that XLA compiles: all but collectives and updates.

    compiled:  forward pass, losses, metrics, backward pass
    then:      gradients -> the path of a step (`tfdp.training.step.path`)

Plain Keras compiles a step on one device as a whole. XLA cannot compile collectives
over the devices of other processes, so that a step is cut where it gives its gradients
to the optimizer: what comes before and what comes after it, the logs, are one function;
the updates follow. A step that cannot be cut or compiled runs without XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import is_collective, step_events
from tfdp.ground import _compat, user_code
from tfdp.ground.base import batch_weight, deferred_updates, xla
from tfdp.ground.base.batch_weight import BatchWeight
from tfdp.ground.base.deferred_updates import Update
from tfdp.ground.base.loops import Loop
from tfdp.ground.base.xla import CannotCompileError
from tfdp.training.parameters.sharded_parameter import sharded_parameter


@dataclasses.dataclass
class _Traced:
    """The compiled part of a step."""

    function: Any
    updates: list[Update]


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The step of a replica, compiled as far as it can be.

    Args:
        step: Function of a tuple of arguments and a `BatchWeight` or `None`, which
            returns logs.
        strategy: A tfdp strategy.
        loop: `Loop` of Keras, whose step it is.
    """

    step: Callable
    strategy: Any
    loop: Loop

    def __call__(self, args: tuple, part: BatchWeight | None) -> Any:
        """Run the step of this thread's replica.

        Args:
            args: Tuple of nested structures of tensors.
            part: `BatchWeight` of the replica, or `None`.

        Returns:
            What `step` returns.
        """
        numbers = [] if part is None else [part.weight, part.num_samples]
        traced = self._trace_what_can_be(args, part, numbers)
        if self.loop.trains:
            self._note_compiled(traced)
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
                update.optimizer.apply(_in_order(update, own), update.variables)
        return outputs

    def _device(self) -> str:
        """The device of this thread's replica."""
        replica = _compat.local_replica_id(tf.distribute.get_replica_context())
        return self.strategy.extended.worker_devices[replica]

    def _note_compiled(self, traced: _Traced | None) -> None:
        """Note for `communication_plan` whether XLA compiles what precedes updates."""
        compiled_models = self.strategy.extended.compiled_models
        if traced is not None and traced.updates:
            compiled_models.add(self.loop.model)
        else:
            compiled_models.discard(self.loop.model)

    def _trace_what_can_be(
        self, args: tuple, part: BatchWeight | None, numbers: list
    ) -> _Traced | None:
        """Trace the compiled part of a step, or return `None` if there can be none."""
        reason = ""
        # On one replica the update too, as in plain Keras.
        is_alone = self.strategy.num_replicas_in_sync == 1
        for is_whole in (True, False) if is_alone else (False,):
            try:
                return self._trace(args, part, numbers, is_whole=is_whole)
            except (CannotCompileError, deferred_updates.CannotDeferError) as error:
                reason = str(error)
        name = self.loop.name
        user_code.warn(
            f"`jit_compile=True` is left out: {reason}. `{name}` runs without XLA.",
            once_for=self.loop.model,
            topic=f"XLA in {name}",
        )
        return None

    def _trace(
        self, args: tuple, part: BatchWeight | None, numbers: list, *, is_whole: bool
    ) -> _Traced:
        """Trace the compiled part of a step.

        Raises:
            CannotCompileError: If it cannot be compiled.
            CannotDeferError: If its updates cannot wait for its end.
        """
        _check_inputs(args)
        _check_variables(self.loop.model)
        updates: list[Update] = []

        def compiled(args: tuple, numbers: list) -> Any:
            own = None
            if part is not None:
                weight, num_samples = numbers
                own = BatchWeight(weight, num_samples)
            if is_whole:
                return self.step(args, own), []
            with deferred_updates.deferring() as found:
                outputs = self.step(args, own)
            updates.extend(found)
            return outputs, [update.gradients for update in found]

        concrete = xla.trace(compiled, (args, numbers))
        _check_collectives(concrete.graph)
        _check_order(concrete.graph, updates)
        xla.check(concrete, self._device())
        return _Traced(concrete, updates)


def _in_order(update: Update, gradients: list) -> list:
    """Make gradients known to the graph in the order of the backward pass.

    Buckets are filled in this order, with XLA and without: sharded state lies by it.
    """
    given = [index for index, own in enumerate(gradients) if own is not None]

    def position(index: int) -> tuple[int, int]:
        traced = update.gradients[index]
        parts = tf.nest.flatten(traced, expand_composites=True)
        return max(map(_compat.op_position, parts)), -index

    ordered = list(gradients)
    for index in sorted(given, key=position):
        ordered[index] = tf.nest.map_structure(
            tf.identity, gradients[index], expand_composites=True
        )
    return ordered


def _check_inputs(args: tuple) -> None:
    for tensor in tf.nest.flatten(args):
        if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
            kind = type(tensor).__name__
            raise CannotCompileError(f"a batch has a `{kind}`, which XLA lacks")
        if tf.is_tensor(tensor) and tensor.dtype == tf.string:
            raise CannotCompileError("a batch has strings, which XLA lacks")


def _check_variables(model: Any) -> None:
    if any(sharded_parameter(own) is not None for own in model.variables):
        raise CannotCompileError(
            "parameters are sharded, and the collectives that gather them are not for "
            "XLA"
        )


def _check_collectives(graph: Any) -> None:
    for op in _compat.all_operations(graph):
        if is_collective(op):
            raise CannotCompileError(
                "its step has a collective beside those of the gradients (a "
                "synchronized BatchNormalization, `tfdp.all_gather`, or a loss or log "
                f"of the rows of all replicas: operation {op.name!r})"
            )


def _check_order(graph: Any, updates: list[Update]) -> None:
    """Raise if something that follows an update uses a variable which it changes."""
    changed: set[int] = set()
    for update in updates:
        optimizer = update.optimizer
        variables = [*(update.variables or ()), *optimizer.variables]
        changed |= {
            id(_compat.local_part(variable).handle)
            for variable in variables
            if variable is not _compat.rate_variable(optimizer)
        }
    if not updates:
        return
    for op in graph.get_operations()[updates[0].num_operations :]:
        used = [_compat.outermost(x) for x in op.inputs if x.dtype == tf.resource]
        if changed.intersection(map(id, used)):
            raise CannotCompileError(
                "its `train_step` uses a variable after the update that changes it "
                f"(operation {op.name!r})"
            )
