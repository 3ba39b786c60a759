"""Names of trained variables and optimizer slots, alike with and without sharding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import path_of

# What Keras puts behind the name of a layer to make it unique.
_NUMBER = re.compile(r"_\d+$")


def slot_names(optimizer: Any, variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name a built optimizer's variables, but for counter and rate.

    The name says the attribute and the trained variable that it belongs to, and is
    the same however the state lies.

    Args:
        optimizer: Keras optimizer that is no wrapper.
        variables: Sequence of the variables that it was built for.

    Returns:
        List of tuples of a string and a Keras variable, in Keras's order.
    """
    names: dict[int, str] = {}
    for attribute, slots in _compat.slots_of(optimizer).items():
        for index, slot in enumerate(slots):
            if slot is not None:
                names.setdefault(id(slot), slot_name(attribute, index, variables))
    for attribute, single in _compat.single_variables(optimizer).items():
        names.setdefault(id(single), attribute)
    return [
        (names.get(id(slot), f"variable/{slot.path}"), slot)
        for slot in _compat.state_variables(optimizer)
    ]


def variable_name(index: int, variables: Sequence[Any]) -> str:
    """Name one of several variables by its number, layer and own name.

    Keras numbers layers through all models of a process, and puts the name of a
    model before them or not; the order of variables stays.
    """
    names = path_of(variables[index]).split("/")[-2:]
    return "/".join([str(index), *(_NUMBER.sub("", name) for name in names)])


def slot_name(attribute: str, index: int, variables: Sequence[Any]) -> str:
    """Name of the slot that an attribute holds for one of several variables."""
    return f"{attribute.strip('_')}/{variable_name(index, variables)}"
