"""Training state of a model as named tensors, sharded or not.

Names, shapes and values are those of plain Keras. They do not depend on sharding, on
the number of replicas, nor on whether the optimizer is tfdp's or Keras's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground._compat import (
    keras_model,
    keras_optimizer,
    optimizer_state,
    random_seeds,
    tf_distribute,
)
from tfdp.ground.base.param_groups import innermost, is_multi
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.keras_hooks.file_view import VariableView
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.sharding.optimizer_state import parameter_state
from tfdp.training.sharding.state_tensors import (
    READ_ELEMENTS,
    LocalShard,
    StateTensor,
    renamed,
    reshaped,
    slot_names,
    variable_name,
)

# Tensors with these name prefixes are optional, since not every run scales the loss or
# accumulates gradients.
LOSS_SCALE_PREFIX, ACCUMULATED_PREFIX = "loss_scale", "accumulated"
# A model such as a GAN has further optimizers besides `model.optimizer`. Their tensors
# are named by this prefix and the model's attribute, so that names are unique.
OTHERS_PREFIX = "others"
# Only backups have tensors with this name prefix, the state of a running `fit`, so
# `tfdp.checkpoint.restore` skips them.
RUN_PREFIX = "run"
# Counters are saved in the dtype of Keras's `iterations`, so that a checkpoint does not
# depend on whether the optimizer is tfdp's or Keras's.
COUNTER = "int64"


def model_state(model: keras.Model) -> list[StateTensor]:
    """Return state tensors of the weights and optimizers of a model after an update.

    The variables of metrics, and gradients accumulated since that update, are not
    included. If `model.optimizer` is not built yet, it is built first.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor` with unique names, in the same order on all workers.

    Raises:
        ValueError: If the model has no variables yet, or an optimizer other than
            `model.optimizer` accumulates gradients.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    >>> [tensor.shape for tensor in model_state(model)]
    [(2, 1), (1,)]
    """
    if not model.built:
        raise ValueError(
            "The model has no variables yet. Call `model.build(input_shape)` or train "
            f"it first. Received: {model.name!r}, not built"
        )
    metrics = {*map(id, keras_model.metric_variables(model))}
    variables = [v for v in model.variables if id(v) not in metrics]
    tensors = [
        replicated(model, f"model/{variable_name(i, variables)}", v)
        for i, v in enumerate(variables)
    ]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        tensors += _optimizer_state(model, optimizer)
    for name, other in other_optimizers(model).items():
        if other.built:
            _check_no_accumulation(name, other)
            tensors += [
                renamed(tensor, f"{OTHERS_PREFIX}/{name}/{tensor.name}")
                for tensor in _optimizer_state(model, other)
            ]
    return tensors


def replicated(
    model: keras.Model, name: str, variable: Any, dtype: str | None = None
) -> StateTensor:
    """Return the state tensor of a variable that is equal on every worker.

    Each worker writes an equal share of the elements; of a sharded parameter it writes
    the shards of its replicas.

    Args:
        model: Keras model, whose strategy has the workers.
        name: String, name of the tensor.
        variable: Variable, or an object that is read and assigned like one.
        dtype: String, dtype of the tensor. Defaults to that of the variable.
    """
    parameter = sharded_parameter(variable)
    if parameter is not None:
        return parameter_state(name, parameter)
    group, shape = worker_group_of(model), tuple(variable.shape)
    size = math.prod(shape)
    start, stop = (size * r // group.num_workers for r in (group.rank, group.rank + 1))

    read = functools.partial(tf_distribute.elements_of, variable)

    def write(values: Any) -> None:
        """Assign all elements of the tensor, flat, to the variable."""
        variable.assign(reshaped(values, shape))

    def read_range(first: int, last: int) -> Any:
        """Return a range of the elements that this worker writes, as a flat array.

        Args:
            first: Int, the first element, counted from the first that it writes.
            last: Int, one after the last element, counted in the same way.
        """
        return read(start + first, start + last)

    everything = LocalShard(0, size, lambda: read(0, size), write)
    share = LocalShard(
        start,
        stop,
        lambda: read(start, stop),
        write,
        None if tf_distribute.is_read_as_view(variable) else read_range,
    )
    owned, dtype = tuple(share.split(READ_ELEMENTS)), dtype or str(variable.dtype)
    return StateTensor(name, shape, dtype, owned, (everything,))


def _optimizer_state(model: keras.Model, optimizer: Any) -> Iterator[StateTensor]:
    """Yield the state tensors of one optimizer, including its loss scale."""
    sharded = getattr(optimizer, "shards", None)
    scale = loss_scale_of(optimizer)
    if scale is not None:
        yield replicated(model, f"{LOSS_SCALE_PREFIX}/value", scale[0])
        yield replicated(model, f"{LOSS_SCALE_PREFIX}/good_steps", scale[1], COUNTER)
    for feature in installed_features(optimizer):
        for name, variable in feature.state.items():
            yield replicated(model, name, variable)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_multi(inner):
        yield replicated(model, "optimizer/iterations", _update_counter(inner), COUNTER)
    for number, group in enumerate(innermost(inner)):
        if group.built and keras_optimizer.trained_by(group):
            slots = None
            if sharded is not None:
                slots = sharded.state(sharded.parts[id(group)])
            yield from _param_group_state(model, group, number, slots)


def _param_group_state(
    model: keras.Model, group: Any, number: int, slots: list[StateTensor] | None
) -> Iterator[StateTensor]:
    """Yield the state tensors of one parameter group.

    Args:
        model: Keras model.
        group: Keras optimizer that updates the group.
        number: Int, position of the group in the optimizer.
        slots: List of `StateTensor` of sharded slots, or `None` if they are replicated.
    """
    prefix = f"optimizer{number}"
    yield replicated(model, f"{prefix}/iterations", _update_counter(group), COUNTER)
    if keras_optimizer.has_rate_variable(group):
        rate = keras_optimizer.rate_or_schedule(group)
        yield replicated(model, f"{prefix}/learning_rate", rate)
    if slots is not None:
        yield from (renamed(tensor, f"{prefix}/{tensor.name}") for tensor in slots)
        return
    sums = optimizer_state.accumulators(group)
    for name, slot in slot_names(group, keras_optimizer.trained_by(group)):
        if not any(slot is item for item in sums):
            yield replicated(model, f"{prefix}/{name}", slot)


def saved_variables(model: keras.Model) -> list[Any]:
    """Return the variables that a backup of a model restores.

    They are those of the model, its metrics and optimizers, and the states of random
    generators.

    Args:
        model: Keras model.
    """
    optimizers = [model.optimizer, *other_optimizers(model).values()]
    owners = filter(None, [model, *model.metrics, *optimizers])
    states = random_seeds.seed_variables(model)
    return [*states, *(v for owner in owners for v in owner.variables)]


def loss_scale_of(optimizer: Any) -> tuple[Any, Any] | None:
    """Return an optimizer's loss scale, and its counter of steps without overflow.

    Returns:
        Tuple of two variables, or `None` if the optimizer does not scale the loss.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale, optimizer.step_counter
    scale = optimizer.features.scale if hasattr(optimizer, "features") else None
    return None if scale is None else (scale.value, scale.good_steps)


def installed_features(optimizer: Any) -> list:
    """Return the list of `StepFeature`s that extend a `DistributedOptimizer`'s step.

    It is empty for any other optimizer, and for `None`.
    """
    features = getattr(optimizer, "features", None)
    return [] if features is None else list(features.installed.values())


def _check_no_accumulation(name: str, optimizer: Any) -> None:
    """Raise `ValueError` if another optimizer of the model accumulates gradients.

    Args:
        name: String, the model's attribute that is the optimizer.
        optimizer: tfdp's or Keras's optimizer.
    """
    steps = getattr(optimizer, "accumulation_steps", None)
    parts = innermost(getattr(optimizer, "inner_optimizer", optimizer))
    steps = max([steps or 1, *(p.gradient_accumulation_steps or 1 for p in parts)])
    if steps > 1:
        raise ValueError(
            "Backups and checkpoints save the accumulated gradients of "
            "`model.optimizer` only. Let the model's other optimizers update after "
            f"each batch. Received: {name!r} with {steps} micro-batches"
        )


def _update_counter(group: Any) -> Any:
    """Return the counter of a Keras optimizer's updates, a variable or variable-like.

    Keras itself counts micro-batches if it accumulates gradients.

    Args:
        group: Keras optimizer, of one parameter group or of several.
    """
    counter = optimizer_state.own_variables(group)[0]
    steps = group.gradient_accumulation_steps
    if not steps:
        return counter

    def write(value: Any) -> None:
        """Set the number of updates; keep the micro-batches since the last update."""
        rest = int(counter.numpy()) % steps
        counter.assign(int(np.asarray(value)) * steps + rest)

    return VariableView(
        counter.path, (), lambda: np.asarray(int(counter.numpy()) // steps), write
    )
