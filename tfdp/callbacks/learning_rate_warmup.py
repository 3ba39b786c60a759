"""Learning-rate warmup for large batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.features import warmup
from tfdp.features.warmup import Warmup, WarmupOptions
from tfdp.ground.arguments import checked_bool, checked_integer, checked_number
from tfdp.ground.plans.schedules import steps_at_epoch
from tfdp.training.optimizer.distributed import DistributedOptimizer
from tfdp.training.optimizer.features import installed

# Stages of a warmup. Backups contain these strings, so a change would break older
# backups.
_WAITING, _RISING, _OVER = "waiting", "rising", "over"


class LearningRateWarmup(OptimizerCallback):
    """Raise the learning rate linearly, update by update, to suit a large batch.

    The rate rises from the base rate, that of the optimizer, to the base rate times
    the number of replicas. After the warmup, a rate that is a variable has the
    product as its value, which other callbacks may change; a `LearningRateSchedule`
    stays multiplied.

    Args:
        epochs: Float or `None`, length in epochs. Defaults to 5 if `steps`
            is not given.
        steps: Int or `None`, length in updates.
        initial_factor: Float or `None`, the factor of the base rate at the start.
            Defaults to `None`: the final factor divided by the number of replicas.
        scale_with_replicas: Bool, whether the final factor is the number of
            replicas; otherwise it is 1. Defaults to `True`.
        momentum_correction: Bool, whether the momentum of `SGD`, which contains
            the rate, is rescaled with it. Defaults to `True`.

    Raises:
        ValueError: If the length or the factor is not positive, or both lengths
            are given.

    Example:

    >>> LearningRateWarmup(steps=500).steps
    500

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677.
    """

    # Workers with different learning rates would end up with different weights, so
    # `fit` raises an error if these settings differ between workers.
    compared = (
        "epochs",
        "steps",
        "initial_factor",
        "scale_with_replicas",
        "momentum_correction",
    )

    def __init__(
        self,
        epochs: float | None = None,
        steps: int | None = None,
        initial_factor: float | None = None,
        scale_with_replicas: bool = True,
        momentum_correction: bool = True,
    ) -> None:
        super().__init__()
        if epochs is not None and steps is not None:
            raise ValueError(
                "Give `epochs` or `steps`, not both. "
                f"Received: epochs={epochs}, steps={steps}"
            )
        epochs = 5 if epochs is None and steps is None else epochs
        self.epochs = _positive("epochs", epochs)
        self.steps = None if steps is None else checked_integer("steps", steps, 1)
        self.initial_factor = _positive("initial_factor", initial_factor)
        self.scale_with_replicas = checked_bool(
            "scale_with_replicas", scale_with_replicas
        )
        self.momentum_correction = checked_bool(
            "momentum_correction", momentum_correction
        )
        self._stage = _WAITING
        self._optimizer: DistributedOptimizer | None = None
        self._has_trained = False
        self._updates = 0

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Install a warmup, whose start and length `on_train_batch_begin` sets."""
        if optimizer is not self._optimizer:
            # Each optimizer has its own warmup, so a new optimizer begins another one.
            self._optimizer = optimizer
            self._stage = _WAITING
        before = installed(optimizer, Warmup)
        if self._stage == _WAITING and before is not None and before.is_over:
            # After a complete warmup, the optimizer's learning rate contains the factor
            # of that warmup, so no second warmup begins.
            self._stage = _OVER
        if self._stage == _WAITING:
            self._has_trained = (
                optimizer.was_traced or self.model.train_function is not None
            )
            self._updates = int(optimizer.iterations.numpy())
            warmup.start(optimizer, self._options(self.steps or 1, self._updates))

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the length of an epoch is known, if the warmup is given in epochs.

        Raises:
            ValueError: If the warmup is given in `epochs`, and `fit` does not know the
                number of batches of an epoch.
        """
        super().on_train_begin(logs)
        if self.epochs is not None and self.params.get("steps") is None:
            raise ValueError(
                "The number of batches of an epoch is unknown. Give "
                "`LearningRateWarmup(steps=...)` or `fit(steps_per_epoch=...)`."
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the warmup, or resume that of an interrupted run.

        Restored updates, from a file or by a callback, count as part of the warmup;
        updates that the model made earlier in this process do not.
        """
        if self._stage != _WAITING:
            return
        self._stage = _RISING
        now = int(self.optimizer.iterations.numpy())
        is_resumed = now != self._updates or not self._has_trained
        options = self._options(self._num_updates(), 0 if is_resumed else now)
        started = warmup.start(self.optimizer, options)
        if now > options.start + options.steps:
            self._stage = _OVER
            started.leave(self.optimizer)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End the warmup after its last update."""
        if self._stage == _RISING and warmup.finish(self.optimizer):
            self._stage = _OVER

    def get_state(self) -> dict[str, Any]:
        """Return the state of the warmup for a backup, as `set_state` takes it."""
        options = warmup.options_of(self._optimizer)
        plain = None if options is None else dataclasses.asdict(options)
        return {"stage": self._stage, "options": plain}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the warmup, also on another number of replicas.

        The warmup keeps the length and the factors that it had when it was saved.

        Args:
            state: Dict from `get_state`: `"stage"`, a string, whether the warmup is
                waiting, rising or over; and `"options"`, the fields of `WarmupOptions`,
                or `None`.
        """
        self._stage = state["stage"]
        if self._stage == _WAITING:
            return
        options = state["options"]
        if options is not None:
            warmup.start(self.optimizer, WarmupOptions(**options))
        # A state without options needs no new warmup, since `enable_feature` has
        # already installed one in this optimizer.
        restored = self.optimizer.features.installed[Warmup]
        restored.is_over |= self._stage == _OVER
        if options is None:
            restored.set(None)

    def _num_updates(self) -> int:
        """Return the length of the warmup in updates."""
        if self.steps is not None:
            return self.steps
        left, updates, epoch = float(self.epochs or 0), 0.0, 0
        while left > 0:
            steps = steps_at_epoch(self.optimizer.accumulation_plan, epoch)
            updates += min(left, 1.0) * self.params["steps"] / steps
            left, epoch = left - 1, epoch + 1
        return max(1, round(updates))

    def _options(self, steps: int, start: int) -> WarmupOptions:
        """Return the options of a warmup of `steps` updates from update `start` on."""
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        last = replicas if self.scale_with_replicas else 1
        first = last / replicas
        if self.initial_factor is not None:
            first = self.initial_factor
        return WarmupOptions(steps, first, last, start, self.momentum_correction)


def _positive(name: str, value: Any) -> float | None:
    """Return an argument that is positive or `None`; raise for any other value."""
    if value is None:
        return None
    return checked_number(name, value, "a positive number", above=0)
