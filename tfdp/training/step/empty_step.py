"""The empty step of Keras: the step without data at the end of unknown length.

Plain Keras finds the end of such data by one more step, whose iterator fails. By then
the parts of an update that need no gradients have run: weights decay, Nadam's product
of momenta advances, the optimizer counts, and layers draw random numbers. If Keras's
own accumulation would make an update, the sums of gradients are reset and nothing is
counted. A replica's step waits for its data and changes nothing. So the empty step runs
after the iterator has failed, and the next epoch begins with the same state as on one
device.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import (
    graphs,
    programs,
    random_seeds,
    tf_distribute,
    xla_lowering,
)
from tfdp.ground.base.step_context import ThreadStack
from tfdp.training.step.path import take_empty_step
from tfdp.training.step.step import Step


class Updates:
    """Record of the optimizer updates of a traced step, for Keras's empty step.

    For each optimizer it has a callable that creates the `Step` of its latest traced
    update. `record_update` fills it, and `run_empty_step` runs the empty step of all
    optimizers: Keras's step without data at the end of data of unknown length.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Callable[[], Step]] = {}
        self._function: Any = None
        self._left_out: str | None = None
        # For each `SeedGenerator`, by its id: the generator, and how often a step draws
        # from it. The empty step advances the generator by the same number of draws.
        self._draws: dict[int, tuple[Any, int]] = {}

    def record(self, optimizer: Any, make_step: Callable[[], Step]) -> None:
        """Record the update of an optimizer, so that `run_empty_step` can repeat it.

        Keras makes a last step without data at the end of data of unknown length:
        `run_empty_step` runs the parts of the update that need no gradients. It
        replaces an earlier record of the same optimizer.

        Args:
            optimizer: Keras optimizer.
            make_step: Callable that creates the optimizer's `Step` (settings and state
                of an update), called on each replica.
        """
        self._steps[id(optimizer)] = make_step
        self._function = None

    def record_left_out(self, name: str) -> None:
        """Record a change that Keras makes in its step without data, but tfdp does not.

        `run_empty_step` warns of it. Only the first such change is recorded.

        Args:
            name: String, name of the variable or generator, for the warning.
        """
        self._left_out = self._left_out or name

    def record_draws(self, generator: Any, num_draws: int) -> None:
        """Record how often a step draws from a `SeedGenerator`, whatever its batch.

        `run_empty_step` advances the generator by that number, as Keras does in its
        step without data.

        Args:
            generator: `SeedGenerator` of Keras.
            num_draws: Int, number of draws of a step.
        """
        self._draws[id(generator)] = generator, num_draws

    def run_empty_step(self, strategy: Any) -> None:
        """Make the changes of Keras's last step, which has no data, on all replicas.

        Recorded generators advance, and recorded optimizers run the parts of an update
        that need no gradients, such as weight decay. A warning names a change that
        Keras would also make, but tfdp does not.

        Args:
            strategy: A tfdp strategy, or `None` on one device.
        """
        if self._left_out is not None:
            user_code.warn(
                f"The data of unknown length has ended, and {self._left_out} keeps its "
                "value: plain Keras on one device would change it once more, in a step "
                "without data. Give the length of the data, by "
                "`tf.data.experimental.assert_cardinality`."
            )
            self._left_out = None
        for generator, num_draws in self._draws.values():
            random_seeds.advance(generator, num_draws)
        if not self._steps:
            return
        if strategy is None:
            self._on_replica()
            return
        if self._function is None:

            @tf.function(autograph=False)
            def on_replicas() -> None:
                """Run the parts of updates that need no gradients on every replica."""
                # The strategy's own `run` would divide a batch, and an empty step has
                # none.
                tf.distribute.Strategy.run(strategy, self._on_replica)

            self._function = on_replicas
        self._function()

    def _on_replica(self) -> None:
        """Run the step without data of recorded optimizers on the calling replica."""
        for make_step in self._steps.values():
            take_empty_step(make_step())


_recorded: ThreadStack[Updates] = ThreadStack("updates")


def recording(updates: Updates) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that records optimizer updates that are traced inside.

    Args:
        updates: `Updates` to record them in.
    """
    return _recorded.pushed(updates)


def record_update(optimizer: Any, make_step: Callable[[], Step]) -> None:
    """Record an update that is being traced, for Keras's step without data.

    It is recorded in the innermost `recording`. Nothing is recorded in eager mode, or
    for an update in a branch or a loop.

    Args:
        optimizer: Keras optimizer.
        make_step: Callable that creates the optimizer's `Step` (settings and state of
            an update), called on each replica.
    """
    updates = _recorded.innermost
    if updates is None or tf.executing_eagerly():
        return
    if not graphs.in_branch():
        updates.record(optimizer, make_step)


def record_changes_without_data(model: Any, operations: list, data: list) -> None:
    """Record the state that a step changes independently of its batch.

    Keras also changes it in its step without data, at the end of data of unknown
    length. It is the state of `SeedGenerator`s and of TensorFlow's random operations,
    and other variables, such as a counter of steps, whose new value depends neither on
    the batch nor on variables that depend on it. The innermost `recording` records the
    `SeedGenerator`s, for `run_empty_step` to advance them. Of the others it records the
    first, for a warning.

    Args:
        model: The Keras model.
        operations: List of the operations of a replica's step, oldest first.
        data: List of the tensors of the step's batch.
    """
    updates = _recorded.innermost
    if updates is None:
        return
    paths = {_handle_id(v): v.path for v in model.non_trainable_weights}
    generators = {_handle_id(g.state): g for g in random_seeds.generators_of(model)}
    num_draws: collections.Counter[int] = collections.Counter()
    depends: set[Any] = {tensor.name for tensor in data}
    for op in operations:
        handles = [x for x in op.inputs if x.dtype == tf.resource]
        used = {id(xla_lowering.outermost(x)) for x in handles}
        names = {x.name for x in op.inputs}
        if not depends.isdisjoint(names) or not depends.isdisjoint(used):
            depends.update(x.name for x in op.outputs)
            if op.type != "ReadVariableOp":
                depends.update(used)
        elif op.type.startswith("Assign"):
            num_draws.update(used & generators.keys())
            for changed in used & paths.keys():
                updates.record_left_out(repr(paths[changed]))
        elif programs.draws(op):
            updates.record_left_out(f"the generator of {op.name!r}")
    for handle, count in num_draws.items():
        updates.record_draws(generators[handle], count)


def _handle_id(variable: Any) -> int:
    """Return the id of the handle of the calling replica's part of a variable."""
    return id(tf_distribute.local_part(variable).handle)
