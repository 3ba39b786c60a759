"""The program of one device that this thread traces, as the rooms above see it.

While a step is traced as one device's, code that is called from it leaves out what it
does for several replicas, and notes what cannot be traced: an update, say.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground.base import step_context


@dataclasses.dataclass(frozen=True)
class Effect:
    """What happens between two operations of a program, on each replica.

    Args:
        position: Int, number of operations of the graph before it.
        tensors: Sequence of tensors of the program that it needs.
        kind: String: `"parts"`, gradients, whose parts it gets; `"whole"`; or
            `"as held"`.
        run: Callable of these tensors as a replica has them.
    """

    position: int
    tensors: Sequence[Any]
    kind: str
    run: Callable[[list], None]

    def symbolic_tensors(self) -> list[Any]:
        """Return the tensors that it needs, of composite ones each component."""
        flat = tf.nest.flatten(list(self.tensors), expand_composites=True)
        return [tensor for tensor in flat if tf.is_symbolic_tensor(tensor)]


class ProgramTrace:
    """A program of one device that is traced.

    Args:
        graph: The graph that it is traced in.
    """

    # Whether it is a step that runs eagerly, and nothing is traced.
    is_eager = False

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.effects: dict[Any, list[Effect]] = {}
        # Reads that each replica makes by itself, by the `id` of their placeholder.
        self.reads: dict[int, Callable[[], tf.Tensor]] = {}
        # What gradients are taken of.
        self.losses: list[Any] = []
        self._sources: dict[int, Any] = {}
        self._templates: dict[Any, Any] = {}

    def add(
        self, tensors: Sequence[Any], run: Callable[[list], None], kind: str = "whole"
    ) -> None:
        """Note what each replica does at this place of the program."""
        graph = tf.compat.v1.get_default_graph()
        if graph is not self.graph:
            # TensorFlow drops a branch that returns nothing and has no side effect.
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
        """Return a stand-in for what each replica reads by itself, the same on all."""
        with self.graph.as_default():
            tensor = tf.compat.v1.placeholder(dtype, shape)
        self.reads[id(tensor)] = read
        return tensor

    def note_assigned(self, variable: Any) -> None:
        """Note that the step has assigned a variable that all replicas have."""

    def template_of(self, op: Any, make: Callable[[Any], Any]) -> Any:
        """Return what is kept of an operation for all replicas."""
        if op not in self._templates:
            self._templates[op] = make(op)
        return self._templates[op]

    def source(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for a key before, or make it."""
        if id(key) not in self._sources:
            with self.graph.as_default(), tf.control_dependencies(None):
                self._sources[id(key)] = make()
        return self._sources[id(key)]


def current() -> ProgramTrace | None:
    """Return the program that this thread traces, or `None`."""
    return step_context.current().trace


def traced() -> ProgramTrace | None:
    """Return the program that this thread traces into a graph, or `None`."""
    found = current()
    return None if found is None or found.is_eager else found


def tracing(trace: ProgramTrace | None) -> contextlib.AbstractContextManager[None]:
    """Trace a program inside, or none."""
    return step_context.using(trace=trace)
