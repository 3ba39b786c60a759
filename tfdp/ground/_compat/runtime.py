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
    """Whether TensorFlow has its devices, so that they can't be changed."""
    return context.context()._initialized


def uses_onednn() -> bool:
    """Whether TensorFlow has chosen oneDNN's kernels for this process."""
    return _pywrap_util_port.IsMklEnabled()


def num_local_devices(kind: str) -> int:
    """Number of logical devices of this process itself.

    Under a cluster `tf.config.list_logical_devices` lists those of all workers.
    """
    devices, task = tf.config.list_logical_devices(kind), own_task()
    own = tf.DeviceSpec.from_string(task)
    specs = [tf.DeviceSpec.from_string(device.name) for device in devices]
    return sum(not task or (s.job, s.task) == (own.job, own.task) for s in specs)


def own_task() -> str:
    """Name of this process in its cluster: `"/job:worker/task:1"`, or `""`."""
    server = getattr(context.context(), "_collective_ops_server_def", None)
    return f"/job:{server.job_name}/task:{server.task_index}" if server else ""


def device_type(device: str) -> str:
    """Type of a device: `"CPU"` or `"GPU"`."""
    return tf.DeviceSpec.from_string(device).device_type or "CPU"


def plain_variable(value: Any, dtype: tf.DType, device: str, shape: Any = None) -> Any:
    """A variable that no strategy mirrors, also inside a strategy's scope."""
    with ops.init_scope(), ops.device(device):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, shape=shape, trainable=False
        )


def configure_coordination_service(**config: Any) -> None:
    """Set the coordination service up, with limits that stock leaves out."""
    context.context().configure_coordination_service(**config)


def coordinated_jobs(num_tasks: dict[str, int]) -> list:
    """The jobs whose tasks the coordination service expects."""
    return [
        collective_all_reduce_strategy.coordination_config_pb2.CoordinatedJob(
            name=name, num_tasks=count
        )
        for name, count in num_tasks.items()
    ]


# Under it TensorFlow's own handler of SIGTERM tells the name of the task that got it.
PREEMPTED_TASK_KEY = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"


def set_key_value(key: str, value: str) -> None:
    """Publish a value in the cluster's coordination service."""
    context.context().set_config_key_value(key, value)


def get_key_value(key: str, timeout_seconds: float) -> str:
    """Wait for a value in the cluster's coordination service.

    Raises:
        tf.errors.DeadlineExceededError: If nobody published it in time.
    """
    milliseconds = max(1, int(timeout_seconds * 1000))
    return context.context().get_config_key_value(key, milliseconds)


def delete_key_value(key: str) -> None:
    """Remove a value, or all below a key, from the coordination service."""
    context.context().delete_config_key_value(key)


def abort_collectives(text: str) -> None:
    """End all collectives of this process with an error, now and from now on.

    A collective that waits for a worker that stands still would never end.
    """
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)


# Where Python is while TensorFlow runs a function or a collective, or waits for what
# comes of it; not where it reads data.
_WAITS = (
    "/eager/execute.py",
    "/eager/context.py",
    "/gen_collective_ops.py",
    "/framework/ops.py",
    # Of `strategy.run` outside of functions, which waits for threads of its own.
    "/distribute/mirrored_run.py",
)


def call_in_progress() -> Any:
    """The frame in which the main thread waits for TensorFlow, or `None`.

    A frame that is kept is the same object for as long as the call goes on.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    name = frame.f_code.co_filename.replace(os.sep, "/") if frame else ""
    return frame if "/tensorflow/python/" in name and name.endswith(_WAITS) else None


def remove_generated_files() -> None:
    """Remove the files of AutoGraph, as TensorFlow does when a process ends by itself.

    Their names are those of `tensorflow.python.autograph.pyct.loader.load_source`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError, TypeError):
                os.unlink(module.__file__ or "")


def profile_of(serialized: bytes) -> Any:
    """A profile as `tf.profiler` writes it: planes, their lines, and their events.

    Only TensorBoard's plug-in reads it otherwise. Seen with TensorFlow 2.19 to 2.21.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
