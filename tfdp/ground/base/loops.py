"""The loop of Keras that this thread runs: `fit`, `train_on_batch` and others."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from tfdp.ground.base.step_context import ThreadStack

_TRAINING = ("fit", "train_on_batch")


@dataclasses.dataclass
class Loop:
    """A running loop of Keras.

    Args:
        model: The Keras model.
        name: String, the method of Keras: `"fit"`, `"train_on_batch"` and others.
        receives_global_batches: Bool, whether the loop receives global batches, as
            `train_on_batch` does, instead of batches that are divided already.
        awaits_training_data: Bool, whether the next data that the loop reads is for
            training: `fit` reads training data first and may validate later.
        batch_weights: List of scalar tensors, for each local replica its fraction of
            all samples; set by an eager step of several replicas, otherwise `None`.
        label_record: `tfdp.training.data.batch_labels.LabelRecord` of training data
            from the user's Python code, or `None` for other data.
        program_logs: `tfdp.training.program.logs.LogTail` of the step that is traced,
            the operations that compute logs after the step; or `None`.
        batch_rows: Int, rows of a global batch, except for a smaller last one; or
            `None` if unknown.
        exchange: `GradientExchange` that replaces the all-reduce of gradients, so that
            steps do not wait for all workers; or `None`.
        has_run: Bool, whether the loop has passed a step to `strategy.run`.
    """

    model: Any
    name: str
    receives_global_batches: bool = False
    awaits_training_data: bool = False
    batch_weights: list | None = None
    label_record: Any = None
    program_logs: Any = None
    batch_rows: int | None = None
    exchange: Any = None
    has_run: bool = False

    @property
    def trains(self) -> bool:
        """Bool, whether the loop trains the model."""
        return self.name in _TRAINING

    @property
    def features(self) -> Any:
        """`Features`, such as loss scaling, of the optimizer that the loop trains with.

        It is `None` if the loop does not train, or the optimizer has none.
        """
        optimizer = getattr(self.model, "optimizer", None)
        return getattr(optimizer, "features", None) if self.trains else None

    @property
    def independent_groups(self) -> Any:
        """`IndependentGroups` of replicas, which update on their own, or `None`."""
        return self.features and self.features.independent_groups


_loops: ThreadStack[Loop] = ThreadStack("loops")


def current() -> Loop | None:
    """Return the innermost loop of Keras in this thread, or `None` outside of any."""
    return _loops.innermost


def exchange() -> Any:
    """Return the `GradientExchange` of the innermost loop, or `None`.

    It replaces the all-reduce of gradients, so that steps do not wait for all workers.
    """
    loop = current()
    return None if loop is None else loop.exchange


def awaiting_training_data() -> Loop | None:
    """Return the innermost loop if it reads training data next, or else `None`."""
    loop = current()
    return loop if loop is not None and loop.awaits_training_data else None


def independent_groups() -> Any:
    """Return the `IndependentGroups` that the innermost loop trains with, or `None`.

    These are groups of replicas that update independently, as in local SGD; without
    them, all replicas make the same updates.
    """
    loop = current()
    return None if loop is None else loop.independent_groups


def record_data_read() -> None:
    """Record that the innermost loop has received its first data.

    `awaiting_training_data` then no longer returns the loop.
    """
    if (loop := current()) is not None:
        loop.awaits_training_data = False


def record_batch_rows(rows: int | None) -> None:
    """Record the rows of the innermost loop's global batch, unless they are known.

    `fit` reads training data first, so validation batches do not count.
    """
    if (loop := current()) is not None:
        loop.batch_rows = loop.batch_rows or rows


def is_nested() -> bool:
    """Return whether this thread runs a loop inside another, as a callback may."""
    return len(_loops.items) > 1


def looping(
    model: Any,
    name: str,
    *,
    receives_global_batches: bool = False,
    exchange: Any = None,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a loop of Keras runs; `current` returns its `Loop`.

    Args:
        model: The Keras model.
        name: String, the method of Keras, such as `"fit"`.
        receives_global_batches: Bool, whether the loop receives global batches, instead
            of batches that are divided already. Defaults to `False`.
        exchange: `GradientExchange` that replaces the all-reduce of gradients, or
            `None`. Defaults to `None`.
    """
    awaits = name == "fit"
    return _loops.pushed(
        Loop(
            model,
            name,
            receives_global_batches,
            awaits_training_data=awaits,
            exchange=exchange,
        )
    )
