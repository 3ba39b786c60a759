"""Keras optimizers: strategy, trained variables, and the parts of an update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import (
    values,
)
from tensorflow.python.ops import resource_variable_ops

from tfdp.ground._compat.optimizer_views import copy_with


def strategy_of_optimizer(optimizer: Any) -> Any:
    """Return the `tf.distribute.Strategy` that an optimizer was created in.

    If the optimizer was created in none, the current strategy is returned.
    """
    return getattr(optimizer, "_distribution_strategy", None) or (
        tf.distribute.get_strategy()
    )


@contextlib.contextmanager
def scope_of_optimizer(optimizer: Any) -> Iterator[None]:
    """Enter the scope of an optimizer's strategy, unless it is active already."""
    strategy = strategy_of_optimizer(optimizer)
    if tf.distribute.get_strategy() is strategy:
        yield
    else:
        with strategy.scope():
            yield


def share_strategy(optimizer: Any, other: Any) -> None:
    """Give `other` the strategy that `optimizer` was created in."""
    other._distribution_strategy = strategy_of_optimizer(optimizer)


def move_optimizer_into_scope(optimizer: Any, strategy: Any) -> None:
    """Move an optimizer that was created outside a strategy's scope into it, in place.

    It must not be built: only the counter and the learning rate are created again.
    """
    optimizer._distribution_strategy = strategy
    for variable in optimizer.variables:
        recreate_in_scope(variable)
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        move_optimizer_into_scope(inner, strategy)
    for part in getattr(optimizer, "optimizers", []):
        move_optimizer_into_scope(part, strategy)


def recreate_in_scope(variable: Any) -> None:
    """Create the value of a Keras variable again, in the active strategy's scope.

    A variable that has a value for each replica already is not changed.
    """
    if not isinstance(variable.value, values.DistributedVariable):
        value = variable.numpy()
        variable._initialize(value)


def is_on_one_device(variable: Any) -> bool:
    """Return whether a variable is a single `tf.Variable`, not one for each replica."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return isinstance(value, resource_variable_ops.BaseResourceVariable)


def strategy_of_variable(variable: Any) -> Any:
    """Return the strategy of a distributed variable, or `None` for any other one."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return getattr(value, "distribute_strategy", None)


def set_trained(optimizer: Any, variables: list) -> None:
    """Set the variables that an optimizer trains, without creating slots."""
    indices = {optimizer._var_key(v): index for index, v in enumerate(variables)}
    # Attribute assignment would make Keras track the model's variables as the
    # optimizer's, so `vars` is changed directly.
    vars(optimizer)["_trainable_variables_indices"] = indices
    vars(optimizer)["_trainable_variables"] = list(variables)
    optimizer.built = True


def trained_by(optimizer: Any) -> list:
    """Return a list of the Keras variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def check_known(optimizer: Any, variables: list) -> None:
    """Check that an optimizer was built for some variables, or raise Keras's error."""
    optimizer._check_variables_are_known(variables)


def key_of(optimizer: Any, variable: Any) -> Any:
    """Return the key by which an optimizer finds a variable, even before it is built.

    Keras has no public name for it. Checked on Keras 3.12 to 3.15.
    """
    return optimizer._var_key(variable)


def positions_in(optimizer: Any, variables: Iterable[Any]) -> list[int]:
    """Return the positions of variables among those that an optimizer trains."""
    return [optimizer._get_variable_index(variable) for variable in variables]


def inner_index(multi_optimizer: Any, variable: Any) -> int:
    """Return the index of a `MultiOptimizer`'s inner optimizer for a variable."""
    return multi_optimizer._var_to_optimizer_idx[multi_optimizer._var_key(variable)]


def overridden_by_user(optimizer: Any, *names: str) -> list[str]:
    """Return those of the named methods that a user's own class overrides."""
    modules = [getattr(getattr(type(optimizer), n), "__module__", "") for n in names]
    known = ("keras.", "tfdp.")
    return [n for n, m in zip(names, modules, strict=True) if not m.startswith(known)]


def overrides_apply(optimizer: Any) -> bool:
    """Return whether an optimizer is of a user's class with an `apply` of its own."""
    return bool(overridden_by_user(optimizer, "apply", "apply_gradients"))


def rate_or_schedule(optimizer: Any) -> Any:
    """Return an optimizer's learning rate itself: a variable or a schedule."""
    return optimizer._learning_rate


def has_rate_variable(optimizer: Any) -> bool:
    """Return whether an optimizer's learning rate is a variable, not a schedule."""
    return isinstance(optimizer._learning_rate, keras.Variable)


def copy_decay_exclusion(optimizer: Any, copy: Any, variable: Any) -> None:
    """Exclude `copy` from weight decay if an optimizer excludes `variable`.

    `copy` is a copy of `variable`.
    """
    excluded = set(getattr(optimizer, "_exclude_from_weight_decay", ()))
    if optimizer._var_key(variable) in excluded:
        excluded.add(optimizer._var_key(copy))
        vars(optimizer)["_exclude_from_weight_decay"] = excluded


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer applies weight decay to a variable.

    Args:
        optimizer: Keras optimizer.
        variable: One replica's copy of the variable. Keras compares its name with those
            that are excluded from weight decay.
    """
    decays = optimizer.weight_decay is not None
    return decays and optimizer._use_weight_decay(variable)


def drop_missing_gradients(optimizer: Any, gradients: list, variables: list) -> tuple:
    """Return a pair of gradients and variables, without those of gradient `None`.

    Keras warns of the dropped variables, and raises if no gradient is left.
    """
    return optimizer._filter_empty_gradients(gradients, variables)


def overwrite_by_gradients(optimizer: Any, gradients: list, variables: list) -> tuple:
    """Assign each float8 scale its new value, which Keras passes as its gradient.

    Returns:
        Tuple of two lists: the gradients of all other variables, and these variables.
    """
    return optimizer._overwrite_variables_directly_with_gradients(gradients, variables)


def clip_gradients(optimizer: Any, gradients: list) -> list:
    """Return a list of gradients, clipped by an optimizer's `clipnorm` and the like."""
    return optimizer._clip_gradients(gradients)


def apply_weight_decay(optimizer: Any, variables: list) -> None:
    """Decay variables by an optimizer's settings."""
    optimizer._apply_weight_decay(variables)


def update_variables(
    optimizer: Any, gradients: list, variables: list, learning_rate: Any
) -> None:
    """Update variables by reduced gradients, without Keras's all-reduce.

    `learning_rate` is a scalar tensor, used in place of the optimizer's own.
    """
    reduced = copy_with(optimizer, _all_reduce_sum_gradients=list)
    reduced._backend_update_step(gradients, variables, learning_rate)


def count_update(optimizer: Any, count: Any) -> None:
    """Add a number or scalar tensor to an optimizer's `iterations`."""
    optimizer._iterations.assign_add(count)


def update_moving_average(optimizer: Any) -> None:
    """Move an optimizer's averages of the variables towards their values."""
    optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def move_averages(optimizer: Any, variables: list) -> None:
    """Move an optimizer's averages towards given values.

    Args:
        optimizer: Keras optimizer with moving averages.
        variables: List of tensors or `TensorView`s, one for each average, in order.
    """
    optimizer._update_model_variables_moving_average(variables)


def overwrite_with_moving_average(optimizer: Any) -> None:
    """Overwrite an optimizer's trained variables with its moving averages of them."""
    optimizer._overwrite_model_variables_with_average_value(
        optimizer._trainable_variables
    )


def finalize_averages(optimizer: Any, variables: Any) -> None:
    """Overwrite variables with an optimizer's averages, even if some are frozen."""
    averages = optimizer._model_variables_moving_average
    keys = optimizer._trainable_variables_indices
    for variable in variables:
        index = keys.get(optimizer._var_key(variable))
        if index is not None and averages[index] is not None:
            optimizer._distribution_strategy.extended.update(
                variable.value, lambda a, b: a.assign(b), args=(averages[index].value,)
            )
