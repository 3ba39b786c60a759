"""TensorFlow's runtime: devices, coordination service, collectives, profiles."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
)
from tensorflow.python.eager import context
from tensorflow.python.framework import (
    ops,
)
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.util import _pywrap_util_port


def is_context_initialized() -> bool:
    """Return whether TensorFlow has its devices, so that they cannot be changed."""
    return context.context()._initialized


def uses_onednn() -> bool:
    """Return whether TensorFlow uses oneDNN's kernels in this process."""
    return _pywrap_util_port.IsMklEnabled()


def num_local_devices(kind: str) -> int:
    """Return the number of logical devices of this process.

    In a cluster `tf.config.list_logical_devices` lists the devices of all workers.

    Args:
        kind: String, the type of device: `"CPU"` or `"GPU"`.
    """
    devices, task = tf.config.list_logical_devices(kind), own_task()
    own = tf.DeviceSpec.from_string(task)
    specs = [tf.DeviceSpec.from_string(device.name) for device in devices]
    return sum(not task or (s.job, s.task) == (own.job, own.task) for s in specs)


def own_task() -> str:
    """Return this process's task, such as `"/job:worker/task:1"`, or `""`."""
    server = getattr(context.context(), "_collective_ops_server_def", None)
    return f"/job:{server.job_name}/task:{server.task_index}" if server else ""


def device_type(device: str) -> str:
    """Return the type of a device: `"CPU"` or `"GPU"`."""
    return tf.DeviceSpec.from_string(device).device_type or "CPU"


def plain_variable(value: Any, dtype: tf.DType, device: str, shape: Any = None) -> Any:
    """Create a variable that no strategy mirrors, even inside a strategy's scope."""
    with ops.init_scope(), ops.device(device):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, shape=shape, trainable=False
        )


def configure_coordination_service(**config: Any) -> None:
    """Set up the coordination service, with limits that stock strategies leave out."""
    context.context().configure_coordination_service(**config)


def coordinated_jobs(num_tasks: dict[str, int]) -> list:
    """Return the jobs whose tasks the coordination service expects.

    Args:
        num_tasks: Dict from the name of a job, such as `"worker"`, to its tasks.
    """
    return [
        collective_all_reduce_strategy.coordination_config_pb2.CoordinatedJob(
            name=name, num_tasks=count
        )
        for name, count in num_tasks.items()
    ]


# The key under which TensorFlow's handler of SIGTERM publishes the preempted task.
PREEMPTED_TASK_KEY = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"


def set_key_value(key: str, value: str) -> None:
    """Publish a value in the cluster's coordination service."""
    context.context().set_config_key_value(key, value)


def get_key_value(key: str, timeout_seconds: float) -> str:
    """Wait for a value in the cluster's coordination service.

    Raises:
        tf.errors.DeadlineExceededError: If the key is not published in time.
    """
    milliseconds = max(1, int(timeout_seconds * 1000))
    return context.context().get_config_key_value(key, milliseconds)


def delete_key_value(key: str) -> None:
    """Remove a key, or all keys below it, from the coordination service."""
    context.context().delete_config_key_value(key)


def abort_collectives(text: str) -> None:
    """Abort all current and future collectives of this process with an error.

    A collective that waits for a suspended worker would never end otherwise.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)


# Files of TensorFlow in which a thread's Python frame is while it runs a function or a
# collective, or waits for its result. A thread that reads data is in other files.
_WAITS = (
    "/eager/execute.py",
    "/eager/context.py",
    "/gen_collective_ops.py",
    "/framework/ops.py",
    # `strategy.run` outside of functions waits here for the replicas' threads.
    "/distribute/mirrored_run.py",
)


def call_in_progress() -> Any:
    """Return the frame in which the main thread waits for TensorFlow, or `None`.

    The frame is the same object until the call returns, so two results can be compared.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    name = frame.f_code.co_filename.replace(os.sep, "/") if frame else ""
    return frame if "/tensorflow/python/" in name and name.endswith(_WAITS) else None


def remove_generated_files() -> None:
    """Remove the files of AutoGraph, as TensorFlow does when a process exits normally.

    `tensorflow.python.autograph.pyct.loader.load_source` names their modules.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError, TypeError):
                os.unlink(module.__file__ or "")


def profile_of(serialized: bytes) -> Any:
    """Parse a profile in the format of `tf.profiler`: planes, lines and events.

    The only other reader is TensorBoard's plug-in. Checked on TensorFlow 2.19 to 2.21.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
