"""TensorFlow's runtime: devices, server, collectives, profiles."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.distribute import device_util, multi_worker_util
from tensorflow.python.eager import context
from tensorflow.python.framework import (
    ops,
)
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.util import _pywrap_util_port

# An abort of collectives usually takes milliseconds. If it takes more than this many
# seconds, it is taken to hang, and the process is ended.
_ABORT_SECONDS = 10.0


def is_context_initialized() -> bool:
    """Return whether TensorFlow has created its devices, so they cannot be changed."""
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
    """Return this process's task, such as `"/job:worker/task:1"`, or `""` if alone."""
    server = getattr(context.context(), "_collective_ops_server_def", None)
    return f"/job:{server.job_name}/task:{server.task_index}" if server else ""


def canonical_device(device: str) -> str:
    """Return a device's full name, with job and task, from a possibly shorter one."""
    return device_util.canonicalize(device)


@functools.cache
def device_type(device: str) -> str:
    """Return the type in a device's name, such as `"GPU"`; `"CPU"` if it has none."""
    return tf.DeviceSpec.from_string(device).device_type or "CPU"


def plain_variable(value: Any, dtype: tf.DType, device: str, shape: Any = None) -> Any:
    """Create a variable that no strategy mirrors, even inside a strategy's scope.

    Args:
        value: Initial value.
        dtype: `tf.DType` of the variable.
        device: String, device of the variable.
        shape: Shape of the variable, which may have unknown sizes, or `None` for that
            of the value. Defaults to `None`.
    """
    with ops.init_scope(), ops.device(device):
        return resource_variable_ops.ResourceVariable(
            value, dtype=dtype, shape=shape, trainable=False
        )


def start_server(jobs: dict[str, list[str]], job: str, index: int) -> None:
    """Start TensorFlow's server, by which its collectives reach other workers.

    The coordination service, which stock strategies configure, is left out: it would
    join in native code while it holds the GIL, and install a handler of SIGTERM.
    Checked on TensorFlow 2.21.

    Args:
        jobs: Dict from the name of a job, such as `"worker"`, to its addresses.
        job: String, the job of this process.
        index: Int, the index of this process in its job.
    """
    spec, own = tf.train.ClusterSpec(jobs), context.context()
    own.configure_collective_ops(
        collective_leader=multi_worker_util.collective_leader(spec, job, index),
        device_filters=(f"/job:{job}/task:{index}",),
    )
    own.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=spec.as_cluster_def(),
            default_session_config=own.config,
            job_name=job,
            task_index=index,
            protocol="grpc",
        )
    )
    own.ensure_initialized()


def abort_collectives(text: str) -> None:
    """Abort all current and future collectives of this process with an error.

    A collective that waits for a suspended worker would never end otherwise.

    While NCCL connects a group, TensorFlow holds a lock for which the abort waits
    (`NcclManager::StartAbort` of 2.21.0), with the lock of the interpreter. If a worker
    is lost meanwhile, no thread of Python can end this process. A timer that needs no
    lock does, with the stacks of all threads and exit code 1.

    Args:
        text: String, message of the error.
    """
    faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True)
    try:
        context.context().abort_collective_ops(tf.errors.UNAVAILABLE, text)
    finally:
        faulthandler.cancel_dump_traceback_later()


# While a thread runs a function or a collective of TensorFlow, or waits for its result,
# its Python frame is in one of these files. A thread that reads data is in other files,
# so it does not count as waiting.
_WAITS = (
    "/eager/execute.py",
    "/eager/context.py",
    "/gen_collective_ops.py",
    "/framework/ops.py",
    # Outside of functions, `strategy.run` waits in this file for the replicas' threads.
    "/distribute/mirrored_run.py",
)


def call_in_progress() -> Any:
    """Return the frame in which the main thread waits for TensorFlow, or `None`.

    The frame is the same object until the call returns, so two results can be compared.
    """
    frame = main_thread_frame()
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    name = frame.f_code.co_filename.replace(os.sep, "/") if frame else ""
    return frame if "/tensorflow/python/" in name and name.endswith(_WAITS) else None


def main_thread_frame() -> Any:
    """Return the innermost frame of the main thread, or `None` if it has ended.

    It keeps tensors alive, so callers must not keep it.
    """
    return _current_frames().get(threading.main_thread().ident or 0)


# Garbage collection must be off during `sys._current_frames` on Python 3.11, which
# holds a lock there that new threads need: a finalizer that releases the GIL would
# deadlock the process. Python 3.12 does not collect there.
# https://github.com/python/cpython/issues/106883; tests/coordination/test_watch.py
# guards it.
_FRAMES_COLLECT_GARBAGE = sys.version_info[:2] == (3, 11)


def _current_frames() -> dict[int, Any]:
    """Return the frame of each thread by its identifier, without collecting garbage."""
    if not _FRAMES_COLLECT_GARBAGE or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def thread_stacks(most_frames: int) -> dict[int, list[tuple[str, int, str]]]:
    """Return the stack of each thread by its identifier, the innermost frame first.

    Args:
        most_frames: Int, number of innermost frames of a stack.

    Returns:
        Dict from the identifier to tuples of file, line and function. No frame is kept,
        since frames keep tensors alive.
    """
    stacks = {}
    for thread, frame in _current_frames().items():
        stack: list[tuple[str, int, str]] = []
        while frame is not None and len(stack) < most_frames:
            code = frame.f_code
            stack.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
        stacks[thread] = stack
    return stacks


def exclude_from_autograph(package: str) -> None:
    """Exclude a package's functions from AutoGraph, as TensorFlow excludes its own.

    Users' functions that they call through TensorFlow are still converted. They would
    not be below the public `do_not_convert`. Checked on TensorFlow 2.19 and 2.21.

    Args:
        package: String, the package's name.
    """
    rule = autograph_config.DoNotConvert(package)
    autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def remove_generated_files() -> None:
    """Remove the files of AutoGraph, as TensorFlow does when a process exits normally.

    `tensorflow.python.autograph.pyct.loader.load_source` names their modules.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("__autograph_generated_file"):
            with contextlib.suppress(OSError, TypeError):
                os.unlink(module.__file__ or "")


def profile_of(serialized: bytes) -> Any:
    """Parse the bytes of an `.xplane.pb` file of `tf.profiler` into an `XSpace`.

    The only other parser is TensorBoard's plug-in. Checked on TensorFlow 2.19 to 2.21.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)


def before_threads_end(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function when the script has ended, while threads can still be started.

    Functions of `atexit` are called later. From Python 3.12 on, no thread can be
    started then, and pools of threads take no work. No public function is called
    earlier. Checked on Python 3.10 to 3.13.

    Args:
        function: Callable; forked processes call it too.

    Returns:
        The function.
    """
    with contextlib.suppress(RuntimeError):  # raised if the script has ended
        threading._register_atexit(function)  # type: ignore[attr-defined]
    return function
