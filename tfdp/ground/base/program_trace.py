"""Trace of a step as the program of one device, by thread.

While a step is traced as one device's program, code that it calls leaves out its work
for several replicas, and records effects that cannot be traced, such as updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground.base import step_context


@dataclasses.dataclass(frozen=True)
class Effect:
    """Action of a program besides its operations, such as an optimizer's update.

    Each replica runs it between two operations of the program.

    Args:
        position: Int, number of operations of the graph before the effect.
        tensors: Sequence of the program's tensors that the effect needs.
        kind: String, which values of the tensors a replica passes to `run`: `"parts"`,
            its addends of gradients; `"whole"`, the values of the whole batch; or
            `"as is"`, those that the replica has.
        run: Callable that takes the tensors of a replica.
    """

    position: int
    tensors: Sequence[Any]
    kind: str
    run: Callable[[list], None]

    def symbolic_tensors(self) -> list[Any]:
        """Return the effect's symbolic tensors, composite ones as their components."""
        flat = tf.nest.flatten(list(self.tensors), expand_composites=True)
        return [tensor for tensor in flat if tf.is_symbolic_tensor(tensor)]


class ProgramTrace:
    """Trace of a step as the program of one device, which each replica then rebuilds.

    Args:
        graph: The graph that the program is traced in.
    """

    # The subclass for eager steps has a true `is_eager`, since such a step has no
    # graph, and `traced` must not return it.
    is_eager = False

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.effects: dict[Any, list[Effect]] = {}
        # A placeholder stands in the program for a value that each replica reads by one
        # of these functions. The keys are `id`s of placeholders, since tensors are not
        # hashable.
        self.reads: dict[int, Callable[[], tf.Tensor]] = {}
        # Losses, or other tensors, whose gradients the program computes. They are
        # searched for a division by the number of replicas.
        self.losses: list[Any] = []
        self._sources: dict[int, Any] = {}
        self._templates: dict[Any, Any] = {}

    def add(
        self, tensors: Sequence[Any], run: Callable[[list], None], kind: str = "whole"
    ) -> None:
        """Record an effect at this position of the program.

        Args:
            tensors: Sequence of the program's tensors that the effect needs.
            run: Callable that takes the tensors of a replica.
            kind: String, as in `Effect`. Defaults to `"whole"`.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph:
            # TensorFlow would drop a branch that returns nothing and has no side
            # effect. This assertion, which always holds, is a side effect.
            tf.raw_ops.Assert(condition=True, data=["an update"])
            tensors = tf.nest.map_structure(
                lambda part: None if part is None else tf.identity(part),
                list(tensors),
                expand_composites=True,
            )
        position = len(graph.get_operations())
        self.effects.setdefault(graph, []).append(Effect(position, tensors, kind, run))

    def read(
        self, shape: Any, dtype: tf.DType, read: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        """Return a placeholder for a value that each replica reads by itself.

        Args:
            shape: Shape of the value.
            dtype: Type of the value.
            read: Callable that returns the value on a replica, equal on all replicas.
        """
        with self.graph.as_default():
            tensor = tf.compat.v1.placeholder(dtype, shape)
        self.reads[id(tensor)] = read
        return tensor

    def record_assigned(self, variable: Any) -> None:
        """Ignore the step's assignment to a mirrored variable; subclasses record it."""

    def template_of(self, op: Any, make: Callable[[Any], Any]) -> Any:
        """Return the template of an operation, created by `make` at the first call.

        From a template each replica builds its copy of the operation.

        Args:
            op: `tf.Operation` of the program.
            make: Callable that takes `op` and returns the template.
        """
        if op not in self._templates:
            self._templates[op] = make(op)
        return self._templates[op]

    def source(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the tensor that stands for an object, such as a parameter, in a trace.

        Gradients of a sharded parameter are computed with respect to this tensor.

        Args:
            key: The object, compared by identity, so it must exist during the trace.
            make: Callable that creates the tensor, outside of all branches and loops.
        """
        if id(key) not in self._sources:
            with self.graph.as_default(), tf.control_dependencies(None):
                self._sources[id(key)] = make()
        return self._sources[id(key)]


_latest = threading.local()


def record_losses(targets: Sequence[Any]) -> None:
    """Record the losses, or other tensors, that this thread takes gradients of.

    `latest_loss` returns the last one. Losses of a `ProgramTrace` are checked for a
    division by the number of replicas, of which tfdp warns.

    Args:
        targets: Sequence of tensors.
    """
    trace = traced()
    if trace is not None:
        trace.losses += targets
    _latest.loss = weakref.ref(targets[-1]) if targets else None


def latest_loss() -> Any:
    """Return the last tensor that this thread took gradients of; `None` if unknown.

    Only a tensor of the current graph counts, or an eager one in eager mode.
    """
    reference = getattr(_latest, "loss", None)
    loss: Any = None if reference is None else reference()
    if not tf.is_tensor(loss):
        return None
    if not tf.is_symbolic_tensor(loss):
        return loss if tf.executing_eagerly() else None
    return loss if loss.graph is tf.compat.v1.get_default_graph() else None


def current() -> ProgramTrace | None:
    """Return the one-device program that this thread traces or runs eagerly, if any."""
    return step_context.current().trace


def traced() -> ProgramTrace | None:
    """Return the one-device program that this thread traces into a graph, or `None`."""
    trace = current()
    return None if trace is None or trace.is_eager else trace


def tracing(trace: ProgramTrace | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread traces the program `trace`, or none."""
    return step_context.using(trace=trace)
