"""Variables of a model made sharded, one at a time, and divided in another way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import entry_of, path_of
from tfdp.ground.plans.units import (
    Ranges,
    UnitOptions,
    check_layers,
    equal_ranges,
    plan_units,
)
from tfdp.training.parameters.gathers import Gathers
from tfdp.training.parameters.sharded_parameter import (
    ShardedParameter,
    copy_of_elements,
    parameter_of,
    sharded_parameter,
)

# Of all conversions in this process: a function traced before one has old variables.
_num_conversions = 0


def num_conversions() -> int:
    """Return how often variables were given another storage in this process."""
    return _num_conversions


def _count_conversion() -> None:
    global _num_conversions
    _num_conversions += 1


def parameters_in_order(model: Any, trained: Sequence[Any]) -> list[Any]:
    """The parameters of a model that an optimizer shards, in the order of its layers.

    Args:
        model: Keras model.
        trained: Sequence of Keras variables, those of the optimizer.

    Returns:
        List of Keras variables: those that are trained, and those of frozen layers.
    """
    known = {id(variable) for variable in trained}
    return [
        variable
        for variable in _compat.weights_of_layers(model)
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
    """Let each replica keep its part of some variables, and free the rest.

    Variables are converted one at a time, so that never more than one is there
    beside its parts.

    Args:
        variables: Sequence of Keras variables, in the order in which a forward pass
            reads them. Those that have a unit stay as they are.
        strategy: The tfdp strategy that made them.
        gathers: `Gathers`.
        devices: Sequence of strings, where each local replica keeps its parts.
        unit_bytes: Int, largest size of a unit of several layers.
        options: `UnitOptions`.

    Raises:
        ValueError: If `options` names a layer that has no parameters.
    """
    check_layers(options.layers, [path_of(variable) for variable in variables])
    new = [v for v in variables if not _has_unit(v)]
    if new:
        _count_conversion()
    for variable in new:
        if sharded_parameter(variable) is None:
            _shard(variable, strategy, gathers, devices)
        else:
            _take_over(variable, gathers, devices)
    entries = [entry_of(variable) for variable in new]
    for unit in plan_units(entries, unit_bytes, options.layers):
        gathers.add_unit([parameter_of(new[index]) for index in unit], options)


def divide_again(
    parameter: ShardedParameter, ranges: Ranges, *, keeps_shape: bool = False
) -> None:
    """Divide the elements of a parameter in another way. All workers call it.

    Args:
        parameter: `ShardedParameter`.
        ranges: `Ranges`, which elements each owner holds from now on.
        keeps_shape: Bool, whether the part of an owner of all elements has the shape
            of the whole. Defaults to `False`.
    """
    whole = parameter.reader.gather_on_hosts(parameter)
    parts = []
    for replica, old in enumerate(parameter.values):
        own = ranges[parameter.reader.owner(replica)]
        is_whole = keeps_shape and own == (0, parameter.num_elements)
        value = whole if is_whole else copy_of_elements(whole, *own)
        parts.append(_compat.variable_like(old, value, old.device))
    parameter.replace_parts(parts, ranges)
    _count_conversion()


@contextlib.contextmanager
def whole_variables(model: Any) -> Iterator[None]:
    """Give a model whole variables for a while. All workers call it.

    What is exported has no replicas to gather from.

    Args:
        model: Keras model.
    """
    sharded = [(v, sharded_parameter(v)) for v in model.variables]
    for variable, parameter in sharded:
        if parameter is not None:
            whole = parameter.reader.gather_on_hosts(parameter)
            first = parameter.values[0]
            plain = _compat.variable_like(first, whole, first.device)
            _compat.set_value_of(variable, plain)
    try:
        yield
    finally:
        for variable, parameter in sharded:
            if parameter is not None:
                _compat.set_value_of(variable, parameter)


def _has_unit(variable: Any) -> bool:
    parameter = sharded_parameter(variable)
    return parameter is not None and parameter.unit is not None


def _take_over(variable: Any, gathers: Gathers, devices: Sequence[str]) -> None:
    """Let parts that no optimizer has planned lie where this one updates them."""
    parameter = parameter_of(variable)
    parameter.casts = _compat.is_cast_when_read(variable)
    places = [part.device for part in parameter.values]
    if parameter.reader is gathers and places == list(devices):
        return
    whole = parameter.reader.gather_on_hosts(parameter)
    ranges = equal_ranges(parameter.num_elements, gathers.groups.num_owners)
    wholes = [whole] * len(devices)
    parts = _parts_of(wholes, parameter.values, ranges, gathers, devices)
    parameter.reader = gathers
    parameter.replace_parts(parts, ranges)


def _shard(
    variable: Any, strategy: Any, gathers: Gathers, devices: Sequence[str]
) -> None:
    shape = tf.TensorShape(variable.shape)
    ranges = equal_ranges(shape.num_elements(), gathers.groups.num_owners)
    copies = variable.value.values
    wholes = (copy.read_value() for copy in copies)
    parts = _parts_of(wholes, copies, ranges, gathers, devices)
    casts = _compat.is_cast_when_read(variable)
    parameter = ShardedParameter(strategy, parts, shape, ranges, gathers, casts=casts)
    _compat.set_value_of(variable, parameter)


def _parts_of(
    wholes: Iterable[tf.Tensor],
    likes: Sequence[tf.Variable],
    ranges: Ranges,
    gathers: Gathers,
    devices: Sequence[str],
) -> list[tf.Variable]:
    """What each local replica keeps of its copy of a whole, one copy at a time."""
    return [
        _compat.variable_like(
            like, copy_of_elements(whole, *ranges[gathers.owner(replica)]), device
        )
        for replica, (whole, like, device) in enumerate(
            zip(wholes, likes, devices, strict=True)
        )
    ]
