"""Parameters that are sharded as soon as they are made, one at a time.

In `strategy.scope(init="deferred")` no replica ever holds a whole model: the initial
value of each trainable variable is divided before the next one is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.checks import check_same_variables
from tfdp.ground import _compat
from tfdp.ground.base.context import in_replica_thread
from tfdp.ground.plans.units import equal_ranges
from tfdp.training.parameters.gathers import gathers_of
from tfdp.training.parameters.shard_groups import shard_groups_of
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    copy_of_elements,
)
from tfdp.training.replicas.synchronized_scope import first_workers_bytes


def is_deferred(extended: Any, arguments: dict[str, Any]) -> bool:
    """Whether a variable that is about to be made is to be sharded at once.

    Args:
        extended: Extended class of a tfdp strategy.
        arguments: Dict, the arguments of the variable's creator.
    """
    dtype = arguments.get("dtype")
    is_parameter = (
        arguments.get("trainable") is True
        and dtype is not None
        and tf.as_dtype(dtype).is_floating
    )
    is_here = tf.executing_eagerly() and not in_replica_thread()
    return extended.defers_parameters and is_here and is_parameter


def deferred_parameter(strategy: Any, arguments: dict[str, Any]) -> ShardedParameter:
    """Make a sharded parameter of the first worker's initial value.

    All workers call it.

    Args:
        strategy: A tfdp strategy of several replicas.
        arguments: Dict, the arguments of the variable's creator.

    Returns:
        `ShardedParameter`.

    Raises:
        ValueError: On all workers, if they make different variables.
    """
    extended = strategy.extended
    name = (arguments.get("name") or "Variable").partition(":")[0]
    with tf.init_scope(), tf.device(extended.host_group.devices[0]):
        whole = _initial_value(extended, name, arguments)
    # After the workers have agreed: the first one is a collective.
    gathers = gathers_of(extended, shard_groups_of(extended, "all"))
    ranges = equal_ranges(whole.shape.num_elements(), gathers.groups.num_owners)
    unique_id = _compat.unique_name(name)
    parts = [
        _compat.component_variable(
            copy_of_elements(whole, *ranges[gathers.owner(replica)]),
            device,
            name,
            unique_id,
        )
        for replica, device in enumerate(extended.group.devices)
    ]
    # Keras's variable is not there yet, which knows whether it is cast when read.
    return ShardedParameter(strategy, parts, whole.shape, ranges, gathers, casts=False)


def _initial_value(extended: Any, name: str, arguments: dict[str, Any]) -> tf.Tensor:
    """The first worker's initial value of a variable, whole."""
    given, dtype = arguments["initial_value"], tf.as_dtype(arguments["dtype"])
    own = tf.convert_to_tensor(given() if callable(given) else given, dtype)
    worker_group = extended.worker_group
    if worker_group.num_workers == 1:
        return own
    made = tf.TensorSpec(own.shape, own.dtype, name)
    check_same_variables(worker_group, f"making {name!r}", [made], "creates")
    first = first_workers_bytes(extended, own.numpy().tobytes())
    if worker_group.rank == 0:
        return own
    values = np.frombuffer(first, own.dtype.as_numpy_dtype)
    return tf.constant(values.reshape(own.shape), own.dtype)
