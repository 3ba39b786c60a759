"""Learning-rate warmup for large batches."""

from __future__ import annotations

from typing import Any

from tfdp.callbacks.conversion import OptimizerCallback
from tfdp.optimizer import DistributedOptimizer
from tfdp.warmup import WarmupOptions


class LearningRateWarmup(OptimizerCallback):
    """Raises the learning rate, update by update, to what a large batch can bear.

    The rate goes in a straight line from the base rate, that of the optimizer,
    to the base rate times the number of replicas. Then the product is handed
    over: a rate that is a variable gets it as its value, for other callbacks to
    act on; a `LearningRateSchedule` stays multiplied.

    Args:
        epochs: Float or `None`, length in epochs. Defaults to 5 where `steps`
            is not given.
        steps: Int or `None`, length in updates.
        initial_factor: Float or `None`, the first factor of the base rate.
            Defaults to `None`: the last factor divided by the number of replicas.
        scale_with_replicas: Bool, whether the last factor is the number of
            replicas, or else 1. Defaults to `True`.
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
        for name, value in (
            ("epochs", epochs),
            ("steps", steps),
            ("initial_factor", initial_factor),
        ):
            if value is not None and not _is_positive(value):
                raise ValueError(
                    f"`{name}` must be a positive number. Received: {name}={value!r}"
                )
        self.epochs = epochs
        self.steps = steps
        self.initial_factor = initial_factor
        self.scale_with_replicas = scale_with_replicas
        self.momentum_correction = momentum_correction
        self._has_begun = False
        self._is_over = False

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Gives the optimizer a warmup; a length in epochs is known later."""
        if not self._is_over:
            optimizer.warmup = self._options(self.steps or 1)

    def on_train_begin(self, logs: Any = None) -> None:
        """Turns epochs into updates, now that the length of one is known."""
        if self._is_over or self.epochs is None:
            return
        batches = self.params.get("steps")
        if batches is None:
            raise ValueError(
                "The data does not tell how many batches an epoch has. Give "
                "`LearningRateWarmup(steps=...)` or `fit(steps_per_epoch=...)`."
            )
        updates = self.epochs * batches / self.optimizer.accumulation_steps
        self.optimizer.warmup = self._options(max(1, round(updates)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Leaves a rate alone that was handed over before training was resumed."""
        options = self.optimizer.warmup
        if self._has_begun or options is None:
            return
        self._has_begun = True
        if int(self.optimizer.iterations.numpy()) > options.steps:
            self._is_over = True
            self.optimizer.leave_warmup()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Hands over after the last update of the warmup."""
        if not self._is_over:
            self._is_over = self.optimizer.finish_warmup()

    def _options(self, steps: int) -> WarmupOptions:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        first, last = (1.0, replicas) if self.scale_with_replicas else (1 / replicas, 1)
        if self.initial_factor is not None:
            first = self.initial_factor
        return WarmupOptions(steps, first, last, self.momentum_correction)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and value > 0
