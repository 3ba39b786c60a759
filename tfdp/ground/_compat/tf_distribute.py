"""Classes of tf.distribute, and access to the values of each replica."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    mirrored_run,
    mirrored_strategy,
    multi_worker_util,
    values,
)
from tensorflow.python.ops import resource_variable_ops

from tfdp.ground._compat.runtime import device_type

# tfdp's strategies derive from these stock classes, so that behavior that tfdp does not
# change stays TensorFlow's own.
MirroredExtended = mirrored_strategy.MirroredExtended
MultiWorkerExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
CollectiveAllReduce = cross_device_ops.CollectiveAllReduce
StockOptions = collective_util.Options
MirroredVariable = values.MirroredVariable
SyncOnReadVariable = values.SyncOnReadVariable
PerReplica = values.PerReplica


def is_one_device(strategy: Any) -> bool:
    """Return whether a strategy is the default one or has a single device."""
    default = distribute_lib._get_default_strategy()
    is_default = type(strategy) is type(default)
    return is_default or isinstance(strategy, tf.distribute.OneDeviceStrategy)


@contextlib.contextmanager
def variable_classes(mapping: dict) -> Iterator[None]:
    """Have TensorFlow create variables of other classes in the block.

    The stock creator reads the classes from a constant of its module.

    Args:
        mapping: Dict that replaces TensorFlow's `VARIABLE_CLASS_MAPPING`.
    """
    stock = distribute_utils.VARIABLE_CLASS_MAPPING
    distribute_utils.VARIABLE_CLASS_MAPPING = mapping
    try:
        yield
    finally:
        distribute_utils.VARIABLE_CLASS_MAPPING = stock


@contextlib.contextmanager
def without_tf_config() -> Iterator[None]:
    """Hide `TF_CONFIG` from a strategy of one machine, which ignores it.

    TensorFlow reads the variable only to log that it is ignored, and fails if it is
    empty.
    """
    config = os.environ.pop("TF_CONFIG", None)
    try:
        yield
    finally:
        if config is not None:
            os.environ["TF_CONFIG"] = config


def set_cluster_resolver(strategy: Any, resolver: Any) -> None:
    """Set the `cluster_resolver` of a strategy of one process."""
    strategy.extended._cluster_resolver = resolver


def initialize_worker(
    extended: Any,
    resolver: Any,
    devices: tuple[str, ...],
    host: str,
    rank: int,
    num_workers: int,
) -> None:
    """Initialize TensorFlow's `MultiWorkerExtended` on one of several workers.

    TensorFlow's own method would also start a server, and a thread that checks the
    other workers.

    Args:
        extended: `MultiWorkerExtended`.
        resolver: The strategy's `cluster_resolver`.
        devices: Tuple of strings, full names of the local devices.
        host: String, full name of the CPU of this worker.
        rank: Int, rank of this worker.
        num_workers: Int, number of workers.
    """
    extended._cluster_spec = multi_worker_util.normalize_cluster_spec(
        resolver.cluster_spec()
    )
    extended._task_type, extended._task_id = resolver.task_type, resolver.task_id
    extended._id_in_cluster, extended._num_workers = rank, num_workers
    extended._is_chief = rank == 0
    extended._worker_device = host
    extended._collective_keys = cross_device_utils.CollectiveKeys(
        group_key_start=1 + extended._collective_key_base
    )
    extended._cross_device_ops, extended._host_cross_device_ops = (
        CollectiveAllReduce(
            devices=of,
            group_size=len(of) * num_workers,
            options=extended._communication_options,
            collective_keys=extended._collective_keys,
        )
        for of in (devices, [host])
    )
    extended._initialize_single_worker(devices)
    extended._num_devices_per_worker = len(devices)
    extended._local_device_type = tf.DeviceSpec.from_string(devices[0]).device_type
    extended._rpc_layer = resolver.rpc_layer


def stock_initial_value(
    extended: Any, replica_id: int, device: Any, primary: Any, **kwargs: Any
) -> Any:
    """Return the initial value of a mirrored variable, without a broadcast.

    Args:
        extended: The `extended` of a strategy.
        replica_id: Int, index among the local replicas.
        device: String, device of the replica.
        primary: Variable of the first local replica, or `None` while it is created.
        **kwargs: Arguments of the variable.
    """
    return MirroredExtended._get_variable_creator_initial_value(
        extended, replica_id, device, primary, **kwargs
    )


@contextlib.contextmanager
def outside_strategies() -> Iterator[None]:
    """Leave the scope of every strategy in the block, to create plain variables."""
    default = distribute_lib._get_default_replica_mode()
    distribute_lib._push_per_thread_mode(default)
    try:
        # The variable creators of a strategy's scope stay active.
        # `_create_plain_variable` is called before them, and does not call them, so
        # they have no effect.
        with tf.variable_creator_scope(_create_plain_variable):
            yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _create_plain_variable(next_creator: Callable, **kwargs: Any) -> Any:
    """Create a plain variable without `next_creator`, the strategy's own creator."""
    del next_creator
    accepted = ("initial_value", "trainable", "dtype", "name", "shape", "aggregation")
    return resource_variable_ops.ResourceVariable(
        **{name: kwargs.get(name) for name in accepted if name in kwargs}
    )


def forget_functions_of_replicas(strategy: Any) -> None:
    """Have each `tf.function` that an eager `strategy.run` calls be traced again.

    `strategy.run` traces and caches a copy of the function. Checked on TensorFlow 2.21.
    """
    mirrored_run._cfer_fn_cache.pop(strategy, None)


def local_replica_id(replica_context: Any) -> int:
    """Return the index of a replica among those of this process."""
    return replica_context._replica_id


def active_local_replica_id() -> int:
    """Return the index of the running replica among those of this process."""
    return tf.distribute.get_replica_context()._replica_id


def can_merge() -> bool:
    """Return whether `merge_call` works here, to wait for the other local replicas.

    It does not work within a function, a branch or a loop of a replica's step.
    """
    thread = threading.current_thread()
    return getattr(thread, "graph", None) is tf.compat.v1.get_default_graph()


def local_part(variable: Any) -> Any:
    """Return the running replica's `tf.Variable` of a Keras or distributed variable.

    Another variable is returned unchanged.
    """
    variable = getattr(variable, "value", variable)
    if callable(variable):  # a tf.Variable's `value` is a method
        variable = variable.__self__
    if isinstance(variable, values.DistributedVariable):
        return variable._get_replica(active_local_replica_id())
    return variable


def local_value(variable: Any, replica: int) -> Any:
    """Return a local replica's `tf.Variable` of a variable, outside a step.

    Args:
        variable: Keras variable or `tf.Variable`. One that is not distributed has the
            same `tf.Variable` for all replicas.
        replica: Int, index among the local replicas.
    """
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(value, values.DistributedVariable):
        return value.values[replica]
    return value


def view_of(tensor: Any) -> np.ndarray:
    """Return the elements of an eager tensor as an array, on the CPU without a copy.

    `Tensor.numpy` copies, `_numpy` does not. Checked on TensorFlow 2.21.
    """
    return tensor._numpy()


def elements_of(variable: Any, start: int, stop: int) -> Any:
    """Return a range of the flattened elements of a variable, as an array.

    For a variable on the CPU the array is a view. While the view exists, TensorFlow
    assigns to another buffer. Checked on TensorFlow 2.21.

    Args:
        variable: Variable, or another object with a method `numpy`.
        start: Int, index of the first element.
        stop: Int, one after the index of the last element.
    """
    value = _first_value(variable)
    if not hasattr(value, "read_value"):
        return np.asarray(value.numpy()).ravel()[start:stop]
    with tf.device(value.device):
        # The raw operation is called, since `read_value` would add an identity
        # operation, whose result is a second tensor.
        tensor = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
        if device_type(value.device) == "CPU":
            return view_of(tensor).reshape(-1)[start:stop]
        return tf.reshape(tensor, [-1])[start:stop].numpy()


def is_read_as_view(variable: Any) -> bool:
    """Return whether `elements_of` returns a view of a variable, without a copy."""
    value = _first_value(variable)
    return hasattr(value, "read_value") and device_type(value.device) == "CPU"


def _first_value(variable: Any) -> Any:
    """Return the first local replica's `tf.Variable`; other objects as they are."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return value._primary if isinstance(value, values.DistributedVariable) else value


def sum_of_local_parts(variable: Any, num_replicas: int) -> Any:
    """Return the sum over all replicas of a variable with a part on each replica.

    The parts of other workers are estimated by the mean of the local parts.

    Args:
        variable: Keras variable.
        num_replicas: Int, number of replicas of all workers.

    Returns:
        NumPy array, or a scalar of NumPy.
    """
    value = variable.value
    if not isinstance(value, values.DistributedVariable):
        return variable.numpy()
    parts = value.values
    local = sum(part.numpy().astype("float64") for part in parts)
    return (local * (num_replicas / len(parts))).astype(parts[0].dtype.as_numpy_dtype)


def copy_local_parts(source: Any, target: Any, factor: float) -> None:
    """Set each local replica's part of `target` to `factor` times that of `source`.

    Args:
        source: Keras variable.
        target: Keras variable of the same shape, on the same replicas.
        factor: Float.
    """
    pairs = [(source.value, target.value)]
    if isinstance(target.value, values.DistributedVariable):
        pairs = list(zip(source.value.values, target.value.values, strict=True))
    for old, new in pairs:
        new.assign(tf.cast(old, new.dtype) * tf.cast(factor, new.dtype))


def select_replica(replica: int, structure: Any) -> Any:
    """Return a nest like `structure`, of one local replica's part of each value."""
    return distribute_utils.select_replica(replica, structure)


def per_replica(local_values: list, *, always_wrap: bool = False) -> Any:
    """Return one value for each local replica as a `tf.distribute` per-replica value.

    Args:
        local_values: List of values, in the order of the local replicas.
        always_wrap: Bool. If `False`, and all values are the same object, that object
            is returned without a container. Defaults to `False`.
    """
    return distribute_utils.regroup(tuple(local_values), always_wrap=always_wrap)
