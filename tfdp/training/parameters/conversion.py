"""Conversions of a model's variables to sharded parameters, one at a time, and back.

In `strategy.scope(init="deferred")` no replica ever holds a whole model: the initial
value of each trainable variable is divided before the next variable is created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.checks import check_same_variables
from tfdp.ground._compat import keras_model, tensor_reads
from tfdp.ground.base.context import in_replica_thread
from tfdp.ground.base.param_groups import entry_of, path_of
from tfdp.ground.plans.units import (
    Ranges,
    UnitOptions,
    check_layers,
    equal_ranges,
    plan_units,
)
from tfdp.training.parameters.gathers import Gathers, gathers_of
from tfdp.training.parameters.shard_groups import shard_groups_of
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    copy_of_elements,
    parameter_of,
    sharded_parameter,
)
from tfdp.training.replicas.synchronized_scope import broadcast_bytes

# Number of conversions in this process. A function that was traced before the latest
# conversion uses variables that the model no longer has, so it is traced again.
_num_conversions = 0


def num_conversions() -> int:
    """Return how often parameters were sharded or redistributed in this process."""
    return _num_conversions


def _count_conversion() -> None:
    """Count a change of sharded parameters: steps traced before it are outdated."""
    global _num_conversions
    _num_conversions += 1


def parameters_in_order(model: Any, trained: Sequence[Any]) -> list[Any]:
    """Return the parameters of a model that an optimizer shards, in order of layers.

    Args:
        model: Keras model.
        trained: Sequence of Keras variables that the optimizer trains.

    Returns:
        List of Keras variables: trained ones, and floating ones of frozen layers.
    """
    known = {id(variable) for variable in trained}
    return [
        variable
        for variable in keras_model.weights_of_layers(model)
        if id(variable) in known
        or (not variable.trainable and tf.as_dtype(variable.dtype).is_floating)
    ]


def shard_variables(
    variables: Sequence[Any],
    strategy: Any,
    gathers: Gathers,
    devices: Sequence[str],
    unit_bytes: int,
    options: UnitOptions,
) -> None:
    """Convert variables to sharded parameters, and free the whole values.

    The parameters are also divided into units, the sets that a step gathers together.
    Variables are converted one at a time, so that at most one of them is in memory
    both whole and sharded.

    Args:
        variables: Sequence of Keras variables, in the order in which a forward pass
            reads them. Variables that have a unit already are skipped.
        strategy: The tfdp strategy that created them.
        gathers: `Gathers`, which reads the parameters.
        devices: Sequence of strings, the device of each local replica's parts.
        unit_bytes: Int, largest size in bytes of a unit of several layers.
        options: `UnitOptions` of the new units.

    Raises:
        ValueError: If `options` names a layer that has no parameters.
    """
    check_layers(options.layers, [path_of(variable) for variable in variables])
    new = [v for v in variables if not _has_unit(v)]
    if new:
        _count_conversion()
    for variable in new:
        if sharded_parameter(variable) is None:
            _convert(variable, strategy, gathers, devices)
        else:
            _adopt(variable, gathers, devices)
    entries = [entry_of(variable) for variable in new]
    for unit in plan_units(entries, unit_bytes, options.layers):
        gathers.add_unit([parameter_of(new[index]) for index in unit], options)


def repartition(parameter: ShardedParameter, ranges: Ranges) -> None:
    """Change which replica owns which elements of a parameter. All workers call it.

    Args:
        parameter: `ShardedParameter`.
        ranges: `Ranges`, the new range of elements of each owner. If one owner gets all
            elements, its part has the shape of the whole parameter.
    """
    whole = parameter.reader.gather_on_hosts(parameter)
    parts = []
    for replica, old in enumerate(parameter.values):
        own = ranges[parameter.reader.groups.owner(replica)]
        is_whole = own == (0, parameter.num_elements)
        value = whole if is_whole else copy_of_elements(whole, *own)
        parts.append(tensor_reads.variable_like(old, value, old.device))
    parameter.replace_parts(parts, ranges)
    _count_conversion()


def discard_values(variables: Sequence[Any], strategy: Any) -> None:
    """Discard the values of parameters, after a change of the replicas.

    The next optimizer divides the parameters among the new replicas. Until a state is
    loaded, they are zeros.

    Args:
        variables: Sequence of Keras variables, whole or sharded by former replicas.
        strategy: The tfdp strategy that created them.
    """
    _count_conversion()
    for variable in variables:
        copies, casts = variable.value.values, tensor_reads.is_cast_when_read(variable)
        shape = tf.TensorShape(variable.shape)
        if strategy.num_replicas_in_sync > 1:
            value = ShardedParameter(strategy, copies, shape, (), None, casts=casts)
            tensor_reads.set_value_of(variable, value)
        elif sharded_parameter(variable) is not None:
            with strategy.scope():
                tensor_reads.create_value_again(variable, copies[0])


@contextlib.contextmanager
def full_variables(model: Any) -> Iterator[None]:
    """Replace sharded parameters of a model by full variables in a context.

    All workers call it. An exported model needs full variables, since it has no
    replicas to gather from.

    Args:
        model: Keras model.
    """
    sharded = [(v, sharded_parameter(v)) for v in model.variables]
    for variable, parameter in sharded:
        if parameter is not None:
            whole = parameter.reader.gather_on_hosts(parameter)
            first = parameter.values[0]
            plain = tensor_reads.variable_like(first, whole, first.device)
            tensor_reads.set_value_of(variable, plain)
    try:
        yield
    finally:
        for variable, parameter in sharded:
            if parameter is not None:
                tensor_reads.set_value_of(variable, parameter)


def _has_unit(variable: Any) -> bool:
    """Return whether a variable is a sharded parameter that has a unit already.

    A unit is the set of parameters that a step gathers together.
    """
    parameter = sharded_parameter(variable)
    return parameter is not None and parameter.unit is not None


def _adopt(variable: Any, gathers: Gathers, devices: Sequence[str]) -> None:
    """Move the parts of a sharded parameter to the owners and devices of an optimizer.

    Args:
        variable: Keras variable that is sharded already.
        gathers: `Gathers` of the optimizer, which reads the parameter from now on.
        devices: Sequence of strings, the device of each local replica's part.
    """
    parameter = parameter_of(variable)
    parameter.casts = tensor_reads.is_cast_when_read(variable)
    old_devices = [part.device for part in parameter.values]
    if parameter.reader is gathers and old_devices == list(devices):
        return
    if parameter.reader is None:
        whole = tf.zeros(parameter.whole_shape, parameter.dtype)
    else:
        whole = parameter.reader.gather_on_hosts(parameter)
    ranges = equal_ranges(parameter.num_elements, gathers.groups.num_owners)
    wholes = [whole] * len(devices)
    parts = _parts_of(wholes, parameter.values, ranges, gathers, devices)
    parameter.reader = gathers
    parameter.replace_parts(parts, ranges)


def _convert(
    variable: Any, strategy: Any, gathers: Gathers, devices: Sequence[str]
) -> None:
    """Convert a whole variable to a sharded parameter.

    Args:
        variable: Keras variable that is mirrored.
        strategy: The tfdp strategy that created it.
        gathers: `Gathers`, which reads the parameter.
        devices: Sequence of strings, the device of each local replica's part.
    """
    shape = tf.TensorShape(variable.shape)
    ranges = equal_ranges(shape.num_elements(), gathers.groups.num_owners)
    copies = variable.value.values
    wholes = (copy.read_value() for copy in copies)
    parts = _parts_of(wholes, copies, ranges, gathers, devices)
    casts = tensor_reads.is_cast_when_read(variable)
    parameter = ShardedParameter(strategy, parts, shape, ranges, gathers, casts=casts)
    tensor_reads.set_value_of(variable, parameter)


def _parts_of(
    wholes: Iterable[tf.Tensor],
    likes: Sequence[tf.Variable],
    ranges: Ranges,
    gathers: Gathers,
    devices: Sequence[str],
) -> list[tf.Variable]:
    """Create the part of each local replica from its copy of the whole.

    Args:
        wholes: Iterable of tensors, the copy of each local replica; one at a time is in
            memory if it is a generator.
        likes: Sequence of variables, whose attributes the parts get.
        ranges: `Ranges` of all owners.
        gathers: `Gathers`, which knows the owner of each replica.
        devices: Sequence of strings, the device of each part.

    Returns:
        List of `tf.Variable`, one for each local replica.
    """
    owner = gathers.groups.owner
    return [
        tensor_reads.variable_like(
            like, copy_of_elements(whole, *ranges[owner(replica)]), device
        )
        for replica, (whole, like, device) in enumerate(
            zip(wholes, likes, devices, strict=True)
        )
    ]


def is_deferred(extended: Any, arguments: dict[str, Any]) -> bool:
    """Return whether a new variable is created as a sharded parameter, not whole.

    It is in `strategy.scope(init="deferred")`, if the variable is trainable, floating
    and created outside of a step.

    Args:
        extended: Extended object of a tfdp strategy.
        arguments: Dict, the arguments of the variable's creator.
    """
    dtype = arguments.get("dtype")
    is_parameter = (
        arguments.get("trainable") is True
        and dtype is not None
        and tf.as_dtype(dtype).is_floating
    )
    is_outside_step = tf.executing_eagerly() and not in_replica_thread()
    return extended.defers_parameters and is_outside_step and is_parameter


def deferred_parameter(strategy: Any, arguments: dict[str, Any]) -> ShardedParameter:
    """Create a sharded parameter from the first worker's initial value.

    It replaces the creation of a whole variable, see `is_deferred`. All workers call
    it.

    Args:
        strategy: A tfdp strategy of several replicas.
        arguments: Dict, the arguments of the variable's creator.

    Returns:
        `ShardedParameter`.

    Raises:
        ValueError: On all workers, if they create different variables.
    """
    extended = strategy.extended
    name = (arguments.get("name") or "Variable").partition(":")[0]
    with tf.init_scope(), tf.device(extended.host_group.devices[0]):
        whole = _initial_value(extended, name, arguments)
    # Creating the first `Gathers` is a collective call, so it follows the check that
    # all workers create the same variable.
    gathers = gathers_of(extended, shard_groups_of(extended, "all"))
    ranges = equal_ranges(whole.shape.num_elements(), gathers.groups.num_owners)
    unique_id = tensor_reads.unique_name(name)
    parts = [
        tensor_reads.component_variable(
            copy_of_elements(whole, *ranges[gathers.groups.owner(replica)]),
            device,
            name,
            unique_id,
        )
        for replica, device in enumerate(extended.group.devices)
    ]
    # The Keras variable, which determines whether reads are cast, does not exist yet,
    # so `_adopt` sets `casts` later.
    return ShardedParameter(strategy, parts, whole.shape, ranges, gathers, casts=False)


def _initial_value(extended: Any, name: str, arguments: dict[str, Any]) -> tf.Tensor:
    """Return the first worker's whole initial value of a variable.

    All workers call it. It raises an error on all of them if they create different
    variables.

    Args:
        extended: Extended object of a tfdp strategy.
        name: String, name of the variable.
        arguments: Dict, the arguments of the variable's creator.
    """
    initial, dtype = arguments["initial_value"], tf.as_dtype(arguments["dtype"])
    own = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype)
    worker_group = extended.worker_group
    if worker_group.num_workers == 1:
        return own
    spec = tf.TensorSpec(own.shape, own.dtype, name)
    check_same_variables(worker_group, f"making {name!r}", [spec], "creates")
    first = broadcast_bytes(extended, own.numpy().tobytes())
    if worker_group.rank == 0:
        return own
    values = np.frombuffer(first, own.dtype.as_numpy_dtype)
    return tf.constant(values.reshape(own.shape), own.dtype)
