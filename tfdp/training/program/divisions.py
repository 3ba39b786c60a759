"""Warning of a loss that the user's code divides by the number of replicas.

In a loop of Keras the step is that of one device: `num_replicas_in_sync` is 1 in it. A
script that reads the number before the loop divides by more than 1, so its loss
becomes too small.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground.base.program_trace import ProgramTrace
from tfdp.training.program.gathers import user_line_of
from tfdp.training.program.view import operations

# The search for a division of the loss continues to the inputs of these operations.
# They are linear: if an input is divided, so is the loss.
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
    """Warn, once per model, of a loss divided by the number of replicas.

    Args:
        trace: `ProgramTrace` of the step.
        num_replicas: Int, number of replicas.
        names: Set of strings, the names that the user's script gives to that number. An
            empty string stands for any name. Without names nothing is searched.
        model: Keras model that is trained.
    """
    if num_replicas == 1 or not names:
        return
    place = _find_division(trace, num_replicas, names)
    if place is None:
        return
    user_code.warn(
        f"A loss is divided by {num_replicas}, the number of replicas: {place}. In "
        "`fit`, `evaluate` and `predict` a step runs as on one device, so its loss "
        "must not be divided. Remove the division, or read "
        "`strategy.num_replicas_in_sync` within the step, where it is 1.",
        once_for=model,
        topic="division",
    )


def _find_division(
    trace: ProgramTrace, num_replicas: int, names: set[str]
) -> str | None:
    """Describe the user's line that divides a loss by the number of replicas.

    Args:
        trace: `ProgramTrace` of the step, with its losses.
        num_replicas: Int, number of replicas.
        names: Set of strings, the names that the user's script gives to that number. An
            empty string stands for any name.

    Returns:
        String, or `None` if no line divides a loss by it.
    """
    pending = [t.op for t in trace.losses if tf.is_symbolic_tensor(t)]
    seen = set()
    while pending:
        op = pending.pop()
        if op in seen or op.type not in _LINEAR:
            continue
        seen.add(op)
        line = user_line_of(op) if op.type in _DIVISIONS else None
        if line is not None and _constant_number(op.inputs[1]) == num_replicas:
            text = user_code.text_of_line(*line)
            if _divides_by_name(text, num_replicas, names):
                return user_code.describe_line(*line)
        pending += [tensor.op for tensor in op.inputs]
    return None


def _constant_number(tensor: Any) -> float | None:
    """Return the value of a constant scalar, or `None` for another tensor.

    For a cast of a constant, it is the value before the cast.
    """
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    if tensor.op.type != "Const" or tensor.shape.rank != 0:
        return None
    return float(tf.get_static_value(tensor))


def _divides_by_name(text: str, num_replicas: int, names: set[str]) -> bool:
    """Return whether a line with a division reads a name of the number of replicas.

    Args:
        text: String, the line.
        num_replicas: Int, number of replicas. The result is `False` for a line that
            contains the number itself.
        names: Set of strings, the names that the user's script gives to that number. An
            empty string stands for any name.

    Example:

    >>> _divides_by_name("loss / REPLICAS", 2, {"REPLICAS"})
    True
    >>> _divides_by_name("loss / 2", 2, {""}), _divides_by_name("x / t", 2, {"n"})
    (False, False)
    """
    if re.search(rf"(?<![\w.]){num_replicas}(\.0*)?(?![\w.])", text):
        return False
    return "" in names or not names.isdisjoint(re.findall(r"\w+", text))


def replica_count_name(text: str) -> str | None:
    """Return the name to which a line assigns the number of replicas.

    Args:
        text: String, line of the user's script that reads `num_replicas_in_sync`.

    Returns:
        String, the name, or `""` where the line may pass the number on under any name;
        or `None` where the line only computes with it or prints it.

    Example:

    >>> replica_count_name("self.replicas = strategy.num_replicas_in_sync")
    'replicas'
    >>> replica_count_name("batch_size = 64 * strategy.num_replicas_in_sync")
    >>> replica_count_name("model = Model(strategy.num_replicas_in_sync)")
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
