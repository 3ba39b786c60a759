"""Logical CPU devices, for tests with several replicas on a machine without GPUs."""

from __future__ import annotations

from tfdp.communication.cluster.devices import set_logical_cpus


def logical_cpus(count: int) -> list[str]:
    """Split the CPU into logical devices, one for each replica.

    Call it before any other use of TensorFlow.

    Args:
        count: Int, number of devices.

    Returns:
        List of device strings, for `tfdp.MirroredStrategy(devices)`.

    Raises:
        ValueError: If `count` is not a positive integer, or TensorFlow has
            already started with another number of devices.

    Example:

    >>> logical_cpus(2)
    ['CPU:0', 'CPU:1']
    """
    return set_logical_cpus(count)
