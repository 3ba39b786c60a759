"""Stand-ins of a Keras optimizer that show other state."""

from __future__ import annotations

from typing import Any

import keras
from tensorflow.python.distribute import (
    values,
)

from tfdp.ground._compat.distribute import local_part, outside_strategies


def stand_in(optimizer: Any, **attributes: Any) -> Any:
    """An optimizer that shares all state with another, but for some attributes.

    Keras's update reads the learning rate and the slots from the optimizer
    itself. A stand-in is how one update sees others, while the user's stays as
    it is.
    """
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).update(attributes)
    return copy


def with_rate(optimizer: Any, rate: Any) -> Any:
    """A stand-in whose learning rate is a tensor."""
    return stand_in(optimizer, _learning_rate=rate)


def with_counter_read(optimizer: Any) -> Any:
    """A stand-in whose number of updates is a tensor, read once.

    A variable is read again for each variable that is updated, and TensorFlow
    cannot know that what follows, the powers of Adam's betas, say, is the same.
    """
    count = local_part(optimizer._iterations).read_value()
    return stand_in(optimizer, _iterations=count)


def with_slots(optimizer: Any, variable: Any, slots: dict[str, list]) -> Any:
    """A stand-in that was built for one variable, with these slots."""
    indices = {optimizer._var_key(variable): 0}
    return stand_in(optimizer, _trainable_variables_indices=indices, **slots)


def as_accumulating(optimizer: Any, steps: int, variables: list | None) -> Any:
    """A stand-in that looks as if Keras accumulated, with these variables."""
    view = stand_in(optimizer, gradient_accumulation_steps=steps)
    if variables is not None:
        vars(view)["_variables"] = variables
    return view


def with_fixed_scale(optimizer: Any, scale: float) -> Any:
    """A stand-in with a `loss_scale_factor`."""
    view = stand_in(optimizer)
    name = "_loss_scale_factor" if "_inner_optimizers" in vars(view) else None
    vars(view)[name or "loss_scale_factor"] = scale
    return view


def with_state(optimizer: Any, state: list, num_averages: int) -> Any:
    """A stand-in whose variables are the optimizer's own and then these."""
    averages = state[:num_averages]
    return stand_in(
        optimizer,
        _variables=[*optimizer._variables, *state],
        _model_variables_moving_average=averages,
    )


def with_local_value(variable: Any, replica: int) -> Any:
    """A Keras variable that shows only the part of one local replica."""
    value = variable.value if hasattr(variable, "path") else variable
    if isinstance(value, values.DistributedVariable):
        value = value.values[replica]
    if not isinstance(variable, keras.Variable):
        return value
    copy = object.__new__(type(variable))
    vars(copy).update(vars(variable))
    vars(copy)["_value"] = value
    return copy


def adopt(clone: Any, optimizer: Any) -> None:
    """Share an optimizer's counter, rate and decay exclusions with a clone."""
    names = [
        name for name in vars(optimizer) if name.startswith("_exclude_from_weight")
    ]
    for name in ("_iterations", "_learning_rate", "_distribution_strategy", *names):
        vars(clone)[name] = vars(optimizer)[name]


def plain_clone(optimizer: Any) -> Any:
    """An optimizer like another, not built and of no strategy."""
    config = optimizer.get_config()
    with outside_strategies():
        return type(optimizer).from_config(config)


def loss_scale_optimizer(
    optimizer: Any, *, initial_scale: float, growth_steps: int, counters: Any
) -> Any:
    """A `LossScaleOptimizer` around an optimizer, with counters that exist already.

    Building one would build the inner optimizer again.
    """
    with outside_strategies():
        outer = keras.optimizers.LossScaleOptimizer(
            stand_in(optimizer),
            initial_scale=initial_scale,
            dynamic_growth_steps=growth_steps,
        )
    if counters is not None:
        outer.step_counter, outer.dynamic_scale = counters
        outer.built = True
    return outer


def multi_with_parts(optimizer: Any, views: dict[int, Any], counter: Any) -> Any:
    """A `MultiOptimizer` with other optimizers in the place of its own.

    `counter` stands for its own counter, or is `None`.
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
    return stand_in(
        optimizer, _optimizer_map=new, _inner_optimizers=parts, _variables=own
    )
