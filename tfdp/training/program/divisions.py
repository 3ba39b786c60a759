"""A loss that is divided by the number of replicas, which a program has no need of.

In a loop of Keras the step is that of one device: `num_replicas_in_sync` reads 1 in it.
A number that was read before it keeps its value, and so would make the loss smaller.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground.base.program_trace import ProgramTrace
from tfdp.training.program.gathers import user_line_of
from tfdp.training.program.view import operations

# Through these a loss is followed to what it is made of.
_LINEAR = operations(
    """
    Add AddN AddV2 Cast DivNoNan ExpandDims Identity Mean Mul Neg Pack RealDiv Reshape
    Squeeze Sub Sum
    """
)
_DIVISIONS = frozenset(("DivNoNan", "RealDiv"))


def warn_of_division(
    trace: ProgramTrace, num_replicas: int, names: set[str], model: Any
) -> None:
    """Warn, once for a model, of a loss that a user divides by the number of replicas.

    Args:
        trace: `ProgramTrace`.
        num_replicas: Int.
        names: Set of strings, names that the number has in the user's script; with an
            empty one it may have any.
        model: The Keras model.
    """
    if num_replicas == 1 or not names:
        return
    place = _division(trace, num_replicas, names)
    if place is None:
        return
    user_code.warn(
        f"A loss is divided by {num_replicas}, the number of replicas: {place}. In "
        "`fit` and the like a step is that of one device, whose loss is not divided: "
        "leave the division out, or read `strategy.num_replicas_in_sync` within the "
        "step, where it is 1.",
        once_for=model,
        topic="division",
    )


def _division(trace: ProgramTrace, num_replicas: int, names: set[str]) -> str | None:
    pending = [t.op for t in trace.losses if tf.is_symbolic_tensor(t)]
    seen = set()
    while pending:
        op = pending.pop()
        if op in seen or op.type not in _LINEAR:
            continue
        seen.add(op)
        line = user_line_of(op) if op.type in _DIVISIONS else None
        if line is not None and _number(op.inputs[1]) == num_replicas:
            text = user_code.text_of_line(*line)
            if _may_be_of_replicas(text, num_replicas, names):
                return user_code.describe_line(*line)
        pending += [tensor.op for tensor in op.inputs]
    return None


def _number(tensor: Any) -> float | None:
    """Return the number that Python gave, or `None`."""
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "Const" or tensor.shape.rank != 0:
        return None
    return float(tf.get_static_value(tensor))


def _may_be_of_replicas(text: str, num_replicas: int, names: set[str]) -> bool:
    """Return whether a line divides by what the script calls the number of replicas.

    Example:

    >>> _may_be_of_replicas("loss / REPLICAS", 2, {"REPLICAS"})
    True
    >>> _may_be_of_replicas("loss / 2", 2, {""}), _may_be_of_replicas("x / t", 2, {"n"})
    (False, False)
    """
    if re.search(rf"(?<![\w.]){num_replicas}(\.0*)?(?![\w.])", text):
        return False
    return "" in names or not names.isdisjoint(re.findall(r"\w+", text))


def name_of_count(text: str) -> str | None:
    """Return the name that a line gives to the number of replicas.

    Returns:
        String, empty where it may be any; or `None` where the line only computes with
        it or prints it.

    Example:

    >>> name_of_count("self.replicas = strategy.num_replicas_in_sync")
    'replicas'
    >>> name_of_count("batch_size = 64 * strategy.num_replicas_in_sync")
    >>> name_of_count("model = Model(strategy.num_replicas_in_sync)")
    ''
    """
    plain = re.match(
        r"\s*(?:\w+\.)*(\w+)\s*(?::[^=]*)?=\s*[\w.()]+\.num_replicas_in_sync\s*(?:#.*)?$",
        text,
    )
    if plain:
        return plain.group(1)
    product = r"\*\s*[\w.()]+\.num_replicas_in_sync|num_replicas_in_sync\s*(\*|//)"
    is_printed = re.match(r"\s*(print|assert|logging|log|logger)\b", text)
    return None if re.search(product, text) or is_printed else ""
