"""State of the optimizers that a model has beside `model.optimizer`, in its files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfdp.ground import user_code
from tfdp.ground.base.param_groups import innermost
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.sharding.state_tensors import StateTensor

# What the names of their tensors begin with, before that of the attribute.
OTHERS_PREFIX = "others"


def check_others_are_built(model: keras.Model, saved: Iterable[str]) -> None:
    """Raise where a file has the state of an optimizer that has no variables yet.

    Args:
        model: Built Keras model.
        saved: Iterable of strings, names of the tensors of the file.

    Raises:
        ValueError: Naming the optimizer.
    """
    names = {_other_of(name) for name in saved}
    for name, optimizer in other_optimizers(model).items():
        if name in names and not optimizer.built:
            raise ValueError(
                "The state of another optimizer of the model was saved, and it has no "
                "variables yet. Build it first, in the scope, for the variables that "
                f"it trains. Received: the attribute {name!r}"
            )


def match_others(
    tensors: Sequence[StateTensor], saved: Iterable[str]
) -> tuple[list[StateTensor], list[str]]:
    """Leave out optimizers, beside the model's own, that only one side has.

    Args:
        tensors: Sequence of `StateTensor` of the model.
        saved: Iterable of strings, names of the tensors of the file.

    Returns:
        Tuple of the tensors to read, and the names in the file that are not read.
    """
    saved = list(saved)
    own = {_other_of(tensor.name) for tensor in tensors} | {None}
    theirs = {_other_of(name) for name in saved} | {None}
    for names, text in (
        (
            theirs - own,
            "is left out: it is not there, or built by its first step",
        ),
        (own - theirs, "was not saved, and goes on as it is"),
    ):
        if names:
            listed = ", ".join(repr(name) for name in sorted(map(str, names)))
            user_code.warn(
                f"The state of another optimizer of the model {text}: {listed}."
            )
    kept = [tensor for tensor in tensors if _other_of(tensor.name) in theirs]
    return kept, [name for name in saved if _other_of(name) not in own]


def _other_of(name: str) -> str | None:
    """The attribute of another optimizer that a tensor belongs to, or `None`."""
    first, _, rest = name.partition("/")
    return rest.partition("/")[0] if first == OTHERS_PREFIX else None


def check_no_sums(name: str, optimizer: Any) -> None:
    """Raise where an optimizer beside the model's own accumulates.

    Args:
        name: String, the attribute.
        optimizer: Keras optimizer.

    Raises:
        ValueError: If an update of it is of several micro-batches.
    """
    steps = getattr(optimizer, "accumulation_steps", None)
    parts = innermost(getattr(optimizer, "inner_optimizer", optimizer))
    steps = max([steps or 1, *(p.gradient_accumulation_steps or 1 for p in parts)])
    if steps > 1:
        raise ValueError(
            "Backups and checkpoints have the accumulated gradients of "
            "`model.optimizer` only. Let the model's other optimizers make an update "
            f"of each batch. Received: {name!r} with {steps} micro-batches"
        )
