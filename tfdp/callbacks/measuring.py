"""What callbacks of the user that time every step have in common."""

from __future__ import annotations

from typing import Any

from tfdp.keras_hooks import install
from tfdp.monitor.meter import TimedSteps
from tfdp.optimizer.arguments import check_strategy


class MeasuringCallback(TimedSteps):
    """A callback that is told of every step, and that needs a strategy of tfdp."""

    def __init__(self) -> None:
        super().__init__()
        install.install()

    def set_model(self, model: Any) -> None:
        """Checks the strategy."""
        super().set_model(model)
        check_strategy(model.distribute_strategy)
