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
    if strategy is None:
        return Meter(norm_every)
    num_replicas = strategy.num_replicas_in_sync
    devices = strategy.extended.group.devices
    if any(_compat.device_type(device) == "GPU" for device in devices):
        return DeviceMeter(norm_every, num_replicas, _wire_bytes(model, strategy))
    return Meter(norm_every, num_replicas)


def _wire_bytes(model: Any, strategy: Any) -> int:
    """Bytes that a replica sends in a step, or 0 where only a step can tell."""
    try:
        return strategy.communication_plan(model).wire_bytes
    except ValueError:
        return 0
