"""Devices of this machine that hold a replica."""

from __future__ import annotations

import os
from collections.abc import Sequence

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.ground.arguments import is_integer
from tfdp.ground.text import pluralize

# A replica on the CPU speeds up training only if it has at least this many cores, which
# limits the default number of replicas.
_CORES_PER_REPLICA = 2
# Limits of the default number of replicas. Two are used wherever there are two cores,
# since one replica would be plain Keras. With more than eight, each one has fewer rows,
# but communicates as many bytes.
_MIN_DEFAULT_REPLICAS, _MAX_DEFAULT_REPLICAS = 2, 8


def local_devices() -> list[str]:
    """Return all logical GPUs of this machine, or else its logical CPU devices.

    Returns:
        List of strings such as `"GPU:0"`.
    """
    return _device_names("GPU") or _device_names("CPU")


def resolve_devices(devices: Sequence[str] | None) -> list[str]:
    """Check a user's list of devices, and shorten their names to `"GPU:0"`.

    Args:
        devices: Sequence of strings, such as `"GPU:0"`, or `None` for all.

    Returns:
        List of strings.

    Raises:
        ValueError: If a device does not exist or is listed twice.
    """
    if devices is None:
        return local_devices()
    if not isinstance(devices, (list, tuple)) or not devices:
        raise ValueError(
            '`devices` must be a list such as ["GPU:0", "GPU:1"]. '
            f"Received: devices={devices!r}"
        )
    resolved = [_short_name(device) for device in devices]
    existing = _device_names("GPU") + _device_names("CPU")
    for device, short in zip(devices, resolved, strict=True):
        if short not in existing:
            raise ValueError(
                f"There is no device {device!r}. Use some of {existing}; "
                "`tfdp.testing.logical_cpus(n)` makes CPU devices. "
                f"Received: devices={list(devices)}"
            )
        if resolved.count(short) > 1:
            raise ValueError(
                f"The device {device!r} is listed twice. List each once. "
                f"Received: devices={list(devices)}"
            )
    return resolved


def set_logical_cpus(count: int) -> list[str]:
    """Split the CPU into logical devices, unless it has that number of them already.

    Args:
        count: Int, number of devices.

    Returns:
        List of device strings.

    Raises:
        ValueError: If `count` is not positive, or TensorFlow has started with
            another number of devices.
    """
    if not is_integer(count, least=1):
        raise ValueError(
            "The number of logical CPU devices must be an integer of at least 1. "
            f"Received: {count!r}"
        )
    count = int(count)
    if runtime.is_context_initialized():
        existing = _device_names("CPU")
        if len(existing) == count:
            return existing
        raise ValueError(
            "TensorFlow has already started, with "
            f"{pluralize(len(existing), 'logical CPU device')}, "
            f"{user_code.start_of_tensorflow()}. Create them before any other use of "
            f"TensorFlow. Received: {count}"
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
    return [f"CPU:{index}" for index in range(count)]


def create_default_cpus(count: int | None) -> None:
    """Create the logical CPU devices of a machine without GPUs.

    Without a number, devices stay as they are if they are configured already or
    TensorFlow has started; a warning follows if it has started with too few. Otherwise
    the cores are also divided between the new devices: the number of intra-op threads
    is set, unless the user has set it.

    Args:
        count: Int, the number of devices, or `None` for one that suits the number
            of cores.
    """
    if count is not None:
        set_logical_cpus(count)
        return
    configured = tf.config.get_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0]
    )
    if configured:
        return
    cores = len(os.sched_getaffinity(0))
    fitting = min(cores // _CORES_PER_REPLICA, _MAX_DEFAULT_REPLICAS)
    wanted = max(min(cores, _MIN_DEFAULT_REPLICAS), fitting)
    if runtime.is_context_initialized():
        if wanted > len(_device_names("CPU")):
            user_code.warn(
                "TensorFlow has already started, "
                f"{user_code.start_of_tensorflow()}: training uses 1 replica instead "
                f"of {wanted}, since the CPU can no longer be divided. Create the "
                "strategy before any other use of TensorFlow and Keras; in a notebook, "
                "restart the kernel first."
            )
        return
    set_logical_cpus(wanted)
    if not tf.config.threading.get_intra_op_parallelism_threads():
        # The replicas run at the same time, so each of them gets an equal part of the
        # cores.
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // wanted))


def _device_names(kind: str) -> list[str]:
    """List the local logical devices of a type, `"GPU"` or `"CPU"`, as `"GPU:0"`."""
    return [f"{kind}:{index}" for index in range(runtime.num_local_devices(kind))]


def _short_name(device: str) -> str:
    """Shorten a device's name to `"GPU:0"`; return an invalid name unchanged."""
    try:
        spec = tf.DeviceSpec.from_string(device)
    except ValueError:
        spec = tf.DeviceSpec()
    if spec.device_type is None or spec.device_index is None:
        return str(device)
    return f"{spec.device_type.upper()}:{spec.device_index}"
