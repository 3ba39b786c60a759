"""Base classes of callbacks that change the optimizer and of those that time steps."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.features.monitor.meter import TimedSteps
from tfdp.ground import user_code
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.keras_hooks import install
from tfdp.training.optimizer.arguments import check_strategy
from tfdp.training.optimizer.distributed import DistributedOptimizer


class StrategyCallback(keras.callbacks.Callback):
    """Base of callbacks for models with a tfdp strategy or none; rejects any other."""

    def __init__(self) -> None:
        super().__init__()
        install.install()

    def set_model(self, model: Any) -> None:
        """Set the model; raise `ValueError` if it has a strategy other than tfdp's."""
        super().set_model(model)
        check_strategy(model.distribute_strategy)


class OptimizerCallback(keras.callbacks.Callback):
    """Callback that enables a feature of its model's `DistributedOptimizer`.

    A subclass enables the feature in `enable_feature`. `set_model` calls it, which
    `fit` calls before it traces the step. This class does not disable the feature when
    `fit` ends.

    Attributes:
        is_in_fit: Bool, whether `fit` is running: from `on_train_begin` to
            `on_train_end`, so not in an `evaluate` outside of `fit`.
    """

    def __init__(self) -> None:
        super().__init__()
        install.install()
        self.is_in_fit = False

    def set_model(self, model: Any) -> None:
        """Enable the feature, and have the step traced again if that changes it.

        Raises:
            ValueError: If the model is not compiled, or has a strategy other than
                tfdp's.
        """
        super().set_model(model)
        name = type(self).__name__
        if not getattr(model, "compiled", False) or model.optimizer is None:
            raise ValueError(
                f"`{name}` needs a model that was compiled with an optimizer. Call "
                "`model.compile(optimizer=...)` first."
            )
        check_strategy(model.distribute_strategy)
        is_new = not isinstance(model.optimizer, DistributedOptimizer)
        self._warn_about_other_optimizers(model)
        self.enable_feature(distributed_optimizer(model))
        if is_new or model.optimizer.needs_trace:
            model.train_function = None

    def _warn_about_other_optimizers(self, model: Any) -> None:
        """Warn about optimizers of a model, such as a GAN, that lack the feature."""
        others = [
            name
            for name, optimizer in other_optimizers(model).items()
            if not isinstance(optimizer, DistributedOptimizer)
        ]
        if others:
            name = type(self).__name__
            user_code.warn(
                f"`{name}` applies only to `model.optimizer`, not to "
                f"{' and '.join(f'`model.{other}`' for other in others)}. Make each of "
                "these a `tfdp.DistributedOptimizer`, which has the same settings."
            )

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Enable the callback's feature in an optimizer; each subclass implements this.

        Args:
            optimizer: `DistributedOptimizer` of the model.
        """
        raise NotImplementedError

    def on_train_begin(self, logs: Any = None) -> None:
        """Set `is_in_fit` to `True`; `evaluate` outside of `fit` does not call this."""
        self.is_in_fit = True

    def on_train_end(self, logs: Any = None) -> None:
        """Set `is_in_fit` to `False`, for hooks that only act within `fit`."""
        self.is_in_fit = False

    @property
    def optimizer(self) -> DistributedOptimizer:
        """`DistributedOptimizer` of the model."""
        return self.model.optimizer


def distributed_optimizer(model: Any) -> DistributedOptimizer:
    """Return the model's `DistributedOptimizer`; wrap a plain optimizer first.

    Args:
        model: A compiled Keras model.

    Returns:
        `DistributedOptimizer` around the model's previous optimizer and its state, or
        the one that the model already had.
    """
    if not isinstance(model.optimizer, DistributedOptimizer):
        with model.distribute_strategy.scope():
            model.optimizer = DistributedOptimizer(model.optimizer)
    return model.optimizer


class MeasuringCallback(StrategyCallback, TimedSteps):
    """Base of callbacks that receive the times of every step, in `on_step_end`."""
