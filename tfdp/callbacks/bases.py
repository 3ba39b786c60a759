"""Base classes: callbacks that change the optimizer, and those that time steps."""

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
    """Callback that needs a strategy of tfdp."""

    def __init__(self) -> None:
        super().__init__()
        install.install()

    def set_model(self, model: Any) -> None:
        """Check the strategy."""
        super().set_model(model)
        check_strategy(model.distribute_strategy)


class OptimizerCallback(keras.callbacks.Callback):
    """Callback that sets a feature of its model's `DistributedOptimizer`.

    It does so when `fit` hands it the model, which is before the step is traced.
    """

    def __init__(self) -> None:
        super().__init__()
        install.install()
        self.is_in_fit = False

    def set_model(self, model: Any) -> None:
        """Switch the feature on; have the step traced again if that changes it.

        Raises:
            ValueError: If the model is not compiled, or its strategy is not tfdp's.
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
        self._warn_of_others(model)
        self.switch_on(distributed_optimizer(model))
        if is_new or model.optimizer.needs_trace:
            model.train_function = None

    def _warn_of_others(self, model: Any) -> None:
        """Warn of optimizers that a model, such as a GAN, has beside its own."""
        others = [
            name
            for name, optimizer in other_optimizers(model).items()
            if not isinstance(optimizer, DistributedOptimizer)
        ]
        if others:
            name = type(self).__name__
            user_code.warn(
                f"`{name}` is for `model.optimizer`, the one of `compile`, and not for "
                f"{' and '.join(f'`model.{other}`' for other in others)}. Make each of "
                "these a `tfdp.DistributedOptimizer`, which has the same settings."
            )

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Switch the callback's feature on.

        Args:
            optimizer: The model's.
        """
        raise NotImplementedError

    def on_train_begin(self, logs: Any = None) -> None:
        """Note that `fit` runs, and not `evaluate`."""
        self.is_in_fit = True

    def on_train_end(self, logs: Any = None) -> None:
        """Note that `fit` is over."""
        self.is_in_fit = False

    @property
    def optimizer(self) -> DistributedOptimizer:
        """`DistributedOptimizer` of the model."""
        return self.model.optimizer


def distributed_optimizer(model: Any) -> DistributedOptimizer:
    """Wrap the model's optimizer in a `DistributedOptimizer`, once.

    Args:
        model: A compiled Keras model.

    Returns:
        `DistributedOptimizer`, around the optimizer that was there, with its
        state.
    """
    if not isinstance(model.optimizer, DistributedOptimizer):
        with model.distribute_strategy.scope():
            model.optimizer = DistributedOptimizer(model.optimizer)
    return model.optimizer


class MeasuringCallback(StrategyCallback, TimedSteps):
    """Callback that times every step."""
