"""Stand-ins for a Keras optimizer with other state.

A stand-in is a shallow copy of an optimizer, on which one update of Keras runs.
"""

from __future__ import annotations

from typing import Any

import keras
from tensorflow.python.distribute import (
    values,
)

from tfdp.ground._compat.tf_distribute import local_part, outside_strategies


def copy_with(optimizer: Any, **attributes: Any) -> Any:
    """Return a shallow copy of an optimizer with some other attributes.

    Keras's update reads the learning rate and the slots from the optimizer itself. With
    a copy, one update gets another rate or other slots, and the user's optimizer does
    not change.
    """
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).update(attributes)
    return copy


def with_rate(optimizer: Any, rate: Any) -> Any:
    """Return a shallow copy of an optimizer with the tensor `rate` as learning rate."""
    return copy_with(optimizer, _learning_rate=rate)


def with_counter_read(optimizer: Any) -> Any:
    """Return a shallow copy of an optimizer whose counter is a tensor, read once.

    A counter that is a variable would be read again for each trained variable.
    TensorFlow then could not merge the computations that depend on it, such as powers
    of Adam's betas.
    """
    count = local_part(optimizer._iterations).read_value()
    return copy_with(optimizer, _iterations=count)


def with_slots(optimizer: Any, variable: Any, slots: dict[str, list]) -> Any:
    """Return a shallow copy of an optimizer, built for one variable with given slots.

    Args:
        optimizer: Keras optimizer.
        variable: Keras variable.
        slots: Dict from the name of an attribute to a list with the slot.
    """
    indices = {optimizer._var_key(variable): 0}
    return copy_with(optimizer, _trainable_variables_indices=indices, **slots)


def with_averages(optimizer: Any, averages: list) -> Any:
    """Return a shallow copy of an optimizer whose moving averages are `averages`."""
    return copy_with(optimizer, _model_variables_moving_average=averages)


def as_accumulating(optimizer: Any, steps: int, variables: list | None) -> Any:
    """Return a shallow copy of an optimizer with Keras's gradient accumulation.

    Args:
        optimizer: Keras optimizer.
        steps: Int, number of micro-batches of an update.
        variables: List of all variables of the copy, or `None` for those of the
            optimizer.
    """
    view = copy_with(optimizer, gradient_accumulation_steps=steps)
    if variables is not None:
        vars(view)["_variables"] = variables
    return view


def with_fixed_scale(optimizer: Any, scale: float) -> Any:
    """Return a shallow copy of an optimizer whose `loss_scale_factor` is `scale`."""
    view = copy_with(optimizer)
    name = "_loss_scale_factor" if "_inner_optimizers" in vars(view) else None
    vars(view)[name or "loss_scale_factor"] = scale
    return view


def with_state(optimizer: Any, state: list, num_averages: int) -> Any:
    """Return a shallow copy of an optimizer with additional variables.

    Args:
        optimizer: Keras optimizer.
        state: List of these variables: moving averages, then all others.
        num_averages: Int, number of moving averages.
    """
    averages = state[:num_averages]
    return copy_with(
        optimizer,
        _variables=[*optimizer._variables, *state],
        _model_variables_moving_average=averages,
    )


def with_local_value(variable: Any, replica: int) -> Any:
    """Return a variable as one local replica has it, with a single `tf.Variable`.

    Args:
        variable: Keras variable, or a `tf.Variable` of TensorFlow or of a strategy.
        replica: Int, index among the local replicas.

    Returns:
        `tf.Variable` of the replica; for a Keras variable, a shallow copy around it.
    """
    value = variable.value if hasattr(variable, "path") else variable
    if isinstance(value, values.DistributedVariable):
        value = value.values[replica]
    if not isinstance(variable, keras.Variable):
        return value
    copy = object.__new__(type(variable))
    vars(copy).update(vars(variable))
    vars(copy)["_value"] = value
    return copy


def share_state(clone: Any, optimizer: Any) -> None:
    """Give a clone an optimizer's counter, rate, strategy and decay exclusions."""
    for name in ("_iterations", "_learning_rate", "_distribution_strategy"):
        vars(clone)[name] = vars(optimizer)[name]
    copy_exclusions(optimizer, clone)


def copy_exclusions(optimizer: Any, clone: Any) -> None:
    """Exclude from a clone's weight decay the variables that an optimizer excludes."""
    for name in vars(optimizer):
        if name.startswith("_exclude_from_weight"):
            vars(clone)[name] = vars(optimizer)[name]


def plain_clone(optimizer: Any) -> Any:
    """Return a clone of an optimizer, not built and without a strategy."""
    config = config_of(optimizer)
    with outside_strategies():
        return clone_from_config(optimizer, config)


def config_of(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's config for `clone_from_config`.

    A learning-rate schedule is in it as the object, not as its own config, which a
    user's schedule may lack.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return optimizer.get_config()
    config = with_rate(optimizer, 0.0).get_config()
    return config | ({"learning_rate": rate} if "learning_rate" in config else {})


def clone_from_config(optimizer: Any, config: dict[str, Any]) -> Any:
    """Create an unbuilt clone of an optimizer, which shares its learning-rate schedule.

    Args:
        optimizer: Keras optimizer.
        config: Dict, the result of `config_of`.

    Raises:
        ValueError: If the class does not accept its own config.
    """
    try:
        clone = type(optimizer).from_config(config)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{type(optimizer).__name__}` cannot be created from its config, which "
            "sharding needs. Write `get_config`, with all arguments of its `__init__`. "
            f"Received: {error}"
        ) from error
    if not isinstance(optimizer._learning_rate, keras.Variable):
        clone.learning_rate = optimizer._learning_rate
    return clone


def loss_scale_optimizer(
    optimizer: Any, *, initial_scale: float, growth_steps: int, counters: Any
) -> Any:
    """Return a `LossScaleOptimizer` around an optimizer, with existing counters.

    With counters it counts as built: a build would build the inner optimizer again.

    Args:
        optimizer: The inner Keras optimizer.
        initial_scale: Float, the first loss scale.
        growth_steps: Int, steps with finite gradients until the scale doubles.
        counters: Pair of the variables of the step counter and of the scale, or `None`
            to leave it unbuilt.
    """
    with outside_strategies():
        outer = keras.optimizers.LossScaleOptimizer(
            copy_with(optimizer),
            initial_scale=initial_scale,
            dynamic_growth_steps=growth_steps,
        )
    if counters is not None:
        outer.step_counter, outer.dynamic_scale = counters
        outer.built = True
    return outer


def multi_with_parts(optimizer: Any, views: dict[int, Any], counter: Any) -> Any:
    """Return a stand-in for a `MultiOptimizer` with other inner optimizers.

    Args:
        optimizer: Keras `MultiOptimizer`.
        views: Dict from the id of an inner optimizer to its stand-in.
        counter: Variable or tensor that replaces its counter, or `None` to keep it.
    """
    old = optimizer._optimizer_map
    new = old
    if hasattr(old, "default_optimizer"):
        new = keras.optimizers.OptimizerMap(
            views[id(old.default_optimizer)],
            {name: views[id(part)] for name, part in old.items()},
        )
    parts = [views[id(part)] for part in optimizer.optimizers]
    own = list(optimizer._variables)
    if counter is not None:
        own[0] = counter
    return copy_with(
        optimizer, _optimizer_map=new, _inner_optimizers=parts, _variables=own
    )
