"""Which meter a strategy's devices need."""

from __future__ import annotations

from typing import Any

from tfdp import _compat
from tfdp.monitor.device_meter import DeviceMeter
from tfdp.monitor.meter import Meter


def meter_for(model: Any, strategy: Any, norm_every: int | None = None) -> Meter:
    """A meter for the devices of a strategy.

    Args:
        model: The Keras model.
        strategy: Its tfdp strategy, or `None`.
        norm_every: Int, at every how manieth step the gradient's norm is noted, or
            `None` for never. Defaults to `None`.

    Returns:
        `Meter`.
    """
    devices = () if strategy is None else strategy.extended.group.devices
    if any(_compat.device_type(device) == "GPU" for device in devices):
        plan = strategy.communication_plan(model) if model.built else None
        return DeviceMeter(norm_every, 0 if plan is None else plan.wire_bytes)
    return Meter(norm_every)
