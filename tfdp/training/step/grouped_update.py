"""Grouped update: many small variables are updated by few large kernels.

An optimizer runs several kernels for each variable, and for a small variable their
launch takes longer than the arithmetic. For an elementwise optimizer, one update of
concatenated variables gives the same numbers. Storage stays the same: variables and
slots are those that Keras created.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import (
    keras_optimizer,
    optimizer_state,
    optimizer_views,
    tf_distribute,
)
from tfdp.ground.base import xla
from tfdp.ground.base.param_groups import gains_from_groups, is_elementwise
from tfdp.training.step.flat_params import FlatParameter, pack

# Largest number of elements of a variable in a group: copying a larger variable costs
# more than the launch of its kernels.
LARGEST_ELEMENTS = 2**11
# Largest number of elements of a group: 128 KB of float32, so that a dozen flat tensors
# fit into the cache of a core. Groups of twice the size took longer.
LARGEST_GROUP = 2**15
# Least mean number of elements of the variables of an update that XLA compiles. For
# smaller variables XLA's single loop is slower than the optimizer's kernels, each of
# which passes through the memory once.
MIN_FOR_XLA = 2**13


def decay_and_update(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], rate: Any
) -> None:
    """Run weight decay and the optimizer's own update on variables of this replica.

    Small variables are updated together, as one flat tensor, see `plan_groups`.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        gradients: Sequence of tensors and `tf.IndexedSlices`, one for each variable.
        variables: Sequence of Keras variables.
        rate: Scalar tensor, the learning rate, or `None` for the optimizer's own.
    """
    groups = plan_groups(optimizer, gradients, variables)
    grouped = {index for group in groups for index in group}
    single = [index for index in range(len(variables)) if index not in grouped]
    optimizer, rate = with_schedule(optimizer, rate)
    _update(
        optimizer, [gradients[i] for i in single], [variables[i] for i in single], rate
    )
    for group in groups:
        members = [variables[index] for index in group]
        _update_group(optimizer, [gradients[i] for i in group], members, rate)


def decay_without_gradients(
    optimizer: Any, variables: Sequence[Any], rate: Any, singles: dict[str, Any]
) -> None:
    """Run the parts of an optimizer's update that need no gradients.

    They are weight decay, and changes of state that belongs to no trained variable,
    such as the product of momenta of Nadam.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        variables: Sequence of the Keras variables that weight decay may change.
        rate: Scalar tensor, the learning rate, or `None` for the optimizer's own.
        singles: Dict from the name of an attribute of the optimizer to the variable of
            sharded state that replaces it in this update. Empty for whole state.
    """
    optimizer, rate = with_schedule(optimizer, rate)
    keras_optimizer.apply_weight_decay(optimizer, list(variables))
    view = optimizer_views.copy_with(optimizer, **singles)
    keras_optimizer.update_variables(view, [], [], rate)


def with_schedule(optimizer: Any, rate: Any) -> tuple[Any, Any]:
    """Return the optimizer and the learning rate for one update.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        rate: Scalar tensor, the learning rate, or `None` for the optimizer's own.

    Returns:
        Tuple of an optimizer and a scalar tensor, the rate. If `rate` is given, the
        optimizer is a shallow copy with that rate. If the optimizer is elementwise, it
        is a shallow copy whose counter is read only once. If neither holds, it is
        `optimizer` itself.
    """
    is_by_elements = is_elementwise(optimizer)
    if rate is None:
        rate = tf.convert_to_tensor(optimizer.learning_rate)
    else:
        optimizer = optimizer_views.with_rate(optimizer, rate)
    if is_by_elements:
        optimizer = optimizer_views.with_counter_read(optimizer)
    return optimizer, rate


def _update(optimizer: Any, gradients: list, variables: list, rate: Any) -> None:
    """Update variables one by one, or all in a function that XLA compiles.

    XLA compiles it if the step is to be compiled, and the gradients are dense and
    large enough, see `gains_from_xla`.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        gradients: List of tensors and `tf.IndexedSlices`.
        variables: List of Keras variables.
        rate: Scalar tensor, the learning rate.
    """

    def update(gradients: list, rate: Any) -> None:
        """Decay and update `variables`.

        The arguments are those of `_update`; if XLA compiles the function, they are the
        corresponding tensors inside of it.
        """
        keras_optimizer.apply_weight_decay(optimizer, variables)
        keras_optimizer.update_variables(optimizer, gradients, variables, rate)

    if xla.should_compile() and gains_from_xla(gradients):
        device = tf_distribute.local_part(variables[0]).device
        xla.run(update, (gradients, rate), device)
    else:
        update(gradients, rate)


def gains_from_xla(gradients: Sequence[Any]) -> bool:
    """Return whether gradients are dense, and large enough to gain from XLA.

    Args:
        gradients: Sequence of tensors and `tf.IndexedSlices`.
    """
    if not gradients or any(isinstance(g, tf.IndexedSlices) for g in gradients):
        return False
    sizes = [gradient.shape.num_elements() or 0 for gradient in gradients]
    return sum(sizes) >= MIN_FOR_XLA * len(sizes)


def plan_groups(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[list[int]]:
    """Choose small variables that are updated together, as one flat tensor.

    The variables of a group have dense gradients, and the same dtypes and weight decay.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        gradients: Sequence of tensors and `tf.IndexedSlices`.
        variables: Sequence of Keras variables.

    Returns:
        List of lists of positions in `variables`, each of at least two variables and at
        most `LARGEST_GROUP` elements. It is empty if the optimizer does not gain from
        groups.
    """
    if not gains_from_groups(optimizer):
        return []
    groups: dict[tuple, list[list[int]]] = {}
    room: dict[tuple, int] = {}
    for index, (gradient, variable) in enumerate(
        zip(gradients, variables, strict=True)
    ):
        local = tf_distribute.local_part(variable)
        size = local.shape.num_elements()
        if size > LARGEST_ELEMENTS or isinstance(gradient, tf.IndexedSlices):
            continue
        decays = keras_optimizer.uses_weight_decay(optimizer, local)
        key = local.dtype, gradient.dtype, decays
        if key not in groups or room[key] < size:
            groups.setdefault(key, []).append([])
            room[key] = LARGEST_GROUP
        groups[key][-1].append(index)
        room[key] -= size
    return [
        group
        for key_groups in groups.values()
        for group in key_groups
        if len(group) > 1
    ]


def _update_group(
    optimizer: Any, gradients: list, variables: list[Any], rate: Any
) -> None:
    """Decay and update small variables, planned as a group, as one flat parameter.

    Args:
        optimizer: Keras optimizer without inner optimizers.
        gradients: List of tensors.
        variables: List of Keras variables.
        rate: Scalar tensor, the learning rate.
    """
    parts = [tf_distribute.local_part(variable) for variable in variables]
    with tf.device(parts[0].device):
        view = FlatParameter(parts)
        positions = keras_optimizer.positions_in(optimizer, variables)
        slots = {}
        for name, items in optimizer_state.slots_of(optimizer).items():
            own = [tf_distribute.local_part(items[i]) for i in positions]
            slots[name] = [FlatParameter(own)]
        flat = optimizer_views.with_slots(optimizer, view, slots)
        if keras_optimizer.uses_weight_decay(optimizer, parts[0]):
            decay = tf.cast(optimizer.weight_decay, view.dtype)
            view.assign_sub(view.read_value() * decay * tf.cast(rate, view.dtype))
        flat.update_step(pack(gradients), view, rate)
        for changed in (view, *(slot for (slot,) in slots.values())):
            changed.write_back()
