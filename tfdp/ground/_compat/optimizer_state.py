"""Variables of a Keras optimizer: slots, accumulators, tracking."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.trackable import data_structures

from tfdp.ground._compat.keras_optimizer import set_trained
from tfdp.ground._compat.optimizer_views import clone_from_config, config_of
from tfdp.ground._compat.tf_distribute import outside_strategies


def own_variables(optimizer: Any) -> list:
    """Return a list of an optimizer's variables, in the order of Keras's files.

    The first is the counter, then follows the learning rate if it is a variable. Those
    of inner optimizers are left out.
    """
    return list(optimizer._variables)


def state_variables(optimizer: Any) -> list:
    """Return a list of a built optimizer's variables without counter and rate."""
    own = (optimizer._iterations, optimizer._learning_rate)
    return [v for v in optimizer._variables if not any(v is item for item in own)]


def single_variables(optimizer: Any) -> dict[str, Any]:
    """Return a dict, by attribute, of variables besides slots, counter and rate."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, keras.Variable)
        and name not in ("_iterations", "_learning_rate")
    }


def slots_of(optimizer: Any) -> dict[str, list]:
    """Return the lists of a built optimizer's slots, by the attribute's name.

    A slot belongs to one trained variable. Accumulators of gradients are left out.
    """
    count = len(optimizer._trainable_variables)
    skipped = ("_trainable_variables", "_variables", "_accumulated_gradients")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and name not in skipped
        and 0 < count == len(value)
        and any(isinstance(item, keras.Variable) for item in value)
    }


def averages_in(slots: dict[str, list]) -> list:
    """Return the list of moving averages in a result of `slots_of`; may be empty."""
    return slots.get("_model_variables_moving_average", [])


def num_variables_before_accumulators(optimizer: Any) -> int:
    """Return the number of an optimizer's variables that precede its accumulators.

    They are the counter, the learning rate if it is a variable, and the averages.
    """
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    has_rate = isinstance(optimizer._learning_rate, keras.Variable)
    has_averages = optimizer.use_ema
    count = sum(v is not None for v in averages) if has_averages else 0
    return 1 + has_rate + count


def accumulators_of(optimizer: Any) -> list:
    """Return a list: each trained variable's gradient accumulator, or `None`."""
    return list(optimizer._accumulated_gradients)


def micro_batch_counter(optimizer: Any) -> Any:
    """Return an optimizer's counter, the variable behind `iterations`.

    It counts micro-batches with `gradient_accumulation_steps`, and updates without.
    """
    return optimizer._iterations


def accumulators(optimizer: Any) -> list:
    """Return a list of an optimizer's gradient accumulators; empty without any."""
    sums = getattr(optimizer, "_accumulated_gradients", None) or []
    return [variable for variable in sums if variable is not None]


def has_accumulators(optimizer: Any) -> bool:
    """Return whether an optimizer was built with gradient accumulators."""
    return bool(getattr(optimizer, "_accumulated_gradients", None))


def pop_accumulators(optimizer: Any) -> list:
    """Remove the gradient accumulators from a built optimizer.

    Returns:
        List of them, one for each trained variable, or `None` for one without.
    """
    sums = list(optimizer._accumulated_gradients)
    untrack(optimizer, [variable for variable in sums if variable is not None])
    optimizer._accumulated_gradients = []
    return sums


def untrack(optimizer: Any, variables: list) -> None:
    """Remove variables from an optimizer's list of tracked variables.

    TensorFlow cannot save or export a tracked list that has lost an element, so a new
    list replaces Keras's.
    """
    for variable in variables:
        optimizer._untrack_variable(variable)
    kept = data_structures.sticky_attribute_assignment(
        trackable=optimizer, name="_variables", value=list(optimizer._variables)
    )
    vars(optimizer)["_variables"] = kept
    is_variable, _ = optimizer._tracker.config["variables"]
    optimizer._tracker.config["variables"] = (is_variable, kept)


def drop_state(optimizer: Any) -> None:
    """Free a built optimizer's variables except for counter and learning rate."""
    dropped = {id(variable) for variable in state_variables(optimizer)}
    untrack(optimizer, state_variables(optimizer))
    for name, value in list(vars(optimizer).items()):
        if id(value) in dropped:
            optimizer._delete_tracking(name)
            vars(optimizer)[name] = None
        elif name != "_variables" and _holds(value, dropped):
            # TensorFlow tracks lists of variables, which keeps the variables alive, so
            # the list is removed from the tracking before it is replaced.
            optimizer._delete_tracking(name)
            vars(optimizer)[name] = {} if isinstance(value, dict) else []


def _holds(value: Any, dropped: set[int]) -> bool:
    """Return whether a list, tuple or dict has an item whose id is in `dropped`."""
    items = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (list, tuple, dict))
    return is_container and any(id(item) in dropped for item in items)


def build_without_state(optimizer: Any, variables: list) -> None:
    """Set the trained variables of an optimizer and its inner ones, without slots."""
    if not hasattr(optimizer, "_inner_optimizers"):
        set_trained(optimizer, variables)
        return
    shells: dict[int, list] = {}
    chosen = {}
    for variable in variables:
        part = optimizer._optimizer_map(variable)
        if not any(part is item for item in optimizer._inner_optimizers):
            part.loss_scale_factor = optimizer.loss_scale_factor
            optimizer._inner_optimizers.append(part)
        index = optimizer._inner_optimizers.index(part)
        chosen[optimizer._var_key(variable)] = index
        shells.setdefault(index, []).append(variable)
    vars(optimizer)["_var_to_optimizer_idx"] = chosen
    for index, part in enumerate(optimizer._inner_optimizers):
        if index in shells:
            set_trained(part, shells[index])
    set_trained(optimizer, variables)


def built_without_memory(optimizer: Any, variables: list) -> Any:
    """Return a built clone of an optimizer whose variables take no memory.

    Variables in a separate graph have shapes and names, but no values.
    """
    # A config contains values of variables, such as the learning rate. While a step is
    # traced, values can only be read inside `init_scope`.
    with tf.init_scope():
        config = config_of(optimizer)
    with tf.Graph().as_default(), outside_strategies():
        clone = clone_from_config(optimizer, config)
        shells = []
        for variable in variables:
            shell = keras.Variable(
                "zeros",
                shape=tuple(variable.shape),
                dtype=variable.dtype,
                name=getattr(variable, "name", "variable").replace("/", "_"),
            )
            vars(shell)["_path"] = getattr(variable, "path", variable.name)
            shells.append(shell)
        clone.build(shells)
    return clone


def copy_of(variable: Any) -> Any:
    """Return a copy of a Keras variable, created in the active strategy's scope."""
    # The copy keeps the name of the `tf.Variable`: Keras excludes variables from weight
    # decay by their names.
    copy = keras.Variable(
        variable.value.read_value(), dtype=variable.dtype, name=variable.name
    )
    for name in ("_name", "_path", "trainable", "constraint"):
        if hasattr(variable, name):
            vars(copy)[name] = getattr(variable, name)
    return copy


def is_on_device(variable: Any, device: str) -> bool:
    """Return whether a Keras variable of one replica is stored on a device."""
    specs = [tf.DeviceSpec.from_string(d) for d in (variable.value.device, device)]
    return len({(spec.device_type, spec.device_index) for spec in specs}) == 1
