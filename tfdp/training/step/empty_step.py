"""The step of Keras that finds no data, at the end of data of unknown length.

Plain Keras finds that end by one step more, whose iterator fails. By then it has done
what an update needs no gradients for: weights decay, Nadam's product of momenta moves,
the optimizer counts. Where its own accumulation would make an update, the sums of
gradients are set to zero, and nothing is counted. A replica's step waits for its data,
and this one is taken when the iterator has failed, so that the next epoch begins as it
does on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat, user_code
from tfdp.training.step.path import take_empty_step
from tfdp.training.step.step import Step


class Updates:
    """The updates of a traced step, by optimizer."""

    def __init__(self) -> None:
        self._steps: dict[int, Callable[[], Step]] = {}
        self._function: Any = None
        self._left_out: str | None = None

    def note(self, optimizer: Any, make_step: Callable[[], Step]) -> None:
        """Note an update.

        Args:
            optimizer: Keras optimizer.
            make_step: Callable that makes its `Step`, in replica context.
        """
        self._steps[id(optimizer)] = make_step
        self._function = None

    def note_left_out(self, name: str) -> None:
        """Note what Keras would change without data, and replicas do not.

        Args:
            name: String, a variable, or an update.
        """
        self._left_out = name

    def take_without_data(self, strategy: Any) -> None:
        """Do on every replica what Keras's updates do without gradients.

        Args:
            strategy: A tfdp strategy, or `None` on one device.
        """
        if self._left_out is not None:
            user_code.warn(
                f"The data ended where nobody knew, and {self._left_out} was left as "
                "it is: plain Keras on one device changes it once more then, by a step "
                "without data. Give the length of the data, by "
                "`tf.data.experimental.assert_cardinality`."
            )
            self._left_out = None
        if not self._steps:
            return
        if strategy is None:
            self._on_replica()
            return
        if self._function is None:

            @tf.function(autograph=False)
            def on_replicas() -> None:
                # The strategy's own `run` divides a batch.
                tf.distribute.Strategy.run(strategy, self._on_replica)

            self._function = on_replicas
        self._function()

    def _on_replica(self) -> None:
        for make_step in self._steps.values():
            take_empty_step(make_step())


_recorded: list[Updates] = []


@contextlib.contextmanager
def recording(updates: Updates) -> Iterator[None]:
    """Record the updates that are traced inside.

    Args:
        updates: `Updates` that they are added to.
    """
    _recorded.append(updates)
    try:
        yield
    finally:
        _recorded.pop()


def note_update(optimizer: Any, make_step: Callable[[], Step]) -> None:
    """Note an update that is traced, unless it depends on a condition.

    Args:
        optimizer: Keras optimizer.
        make_step: Callable that makes its `Step`, in replica context.
    """
    if not _recorded or tf.executing_eagerly():
        return
    if not _compat.in_branch():
        _recorded[-1].note(optimizer, make_step)


def note_changes_without_data(model: Any, operations: list, data: list) -> None:
    """Note a variable of a model that a step changes without its batch.

    Args:
        model: The Keras model.
        operations: List of the operations of a replica's step, oldest first.
        data: List of the tensors of its batch.
    """
    if not _recorded:
        return
    paths = {
        id(_compat.local_part(v).handle): v.path for v in model.non_trainable_weights
    }
    depends: set[Any] = {tensor.name for tensor in data}
    for op in operations:
        handles = [x for x in op.inputs if x.dtype == tf.resource]
        used = {id(_compat.outermost(x)) for x in handles}
        names = {x.name for x in op.inputs}
        if not depends.isdisjoint(names) or not depends.isdisjoint(used):
            depends.update(x.name for x in op.outputs)
            if op.type != "ReadVariableOp":
                depends.update(used)
        elif op.type.startswith("Assign") and not used.isdisjoint(paths):
            (changed,) = used & paths.keys()
            _recorded[-1].note_left_out(repr(paths[changed]))
