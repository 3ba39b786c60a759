"""Base class of the user's callbacks that time every step."""

from __future__ import annotations

from typing import Any

from tfdp.features.monitor.meter import TimedSteps
from tfdp.training.keras_hooks import install
from tfdp.training.optimizer.arguments import check_strategy


class MeasuringCallback(TimedSteps):
    """Callback that times every step, and needs a strategy of tfdp."""

    def __init__(self) -> None:
        super().__init__()
        install.install()

    def set_model(self, model: Any) -> None:
        """Check the strategy."""
        super().set_model(model)
        check_strategy(model.distribute_strategy)
