"""Rules of products of matrices and `Einsum`; `None` where they do not apply.

Labels are letters that name the axes of the inputs and of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.training.program.facts import Fact, own_rows, part
from tfdp.training.program.sizes import FREE, ONE, Size
from tfdp.training.program.view import (
    WHOLE,
    Decision,
    OperationView,
    operations,
    rows_along,
)

# Digits label batch axes, because only these broadcast if their size is one: the axes
# of "..." in an `Einsum`, and those before the last two of a `BatchMatMul`. Letters
# label the others.
_BATCH_LABELS = "12345678"


_CONTRACTIONS = operations("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum")


def decide_contraction(view: OperationView) -> Decision | None:
    """Decide how replicas build a matrix product or an `Einsum` of sharded rows.

    Args:
        view: `OperationView` of the operation, with what is known about its inputs.

    Returns:
        `Decision`: the forms of the inputs that the operation needs, and of its
        output; or `None` for other operations, or if no rule applies.
    """
    labels = _labels(view) if view.type in _CONTRACTIONS else None
    return None if labels is None else _decide_from_labels(view, *labels)


def _labels(view: OperationView) -> tuple[list[str], str] | None:
    """Return labels of the axes of a contraction, as in the equation of an `Einsum`.

    Returns:
        Tuple of a list with a string for each input, and the string of the output, such
        as `(["ik", "kj"], "ij")`; or `None` if a rank is not known.
    """
    if view.type == "Einsum":
        return _einsum_labels(view)
    ranks = [fact.rank for fact in view.facts if fact.rank is not None]
    if len(ranks) < 2:
        return None
    if view.type == "MatMul":
        first = "ki" if view.attribute("transpose_a") else "ik"
        second = "jk" if view.attribute("transpose_b") else "kj"
        return [first, second], "ij"
    first = "yx" if view.attribute("adj_x") else "xy"
    second = "zy" if view.attribute("adj_y") else "yz"
    outer = _BATCH_LABELS[: max(ranks) - 2]
    own = [outer[len(outer) - (rank - 2) :] for rank in ranks]
    return [own[0] + first, own[1] + second], outer + "xz"


def _einsum_labels(view: OperationView) -> tuple[list[str], str] | None:
    """Return labels of the axes from the equation of an `Einsum`.

    Returns:
        Tuple of a list with a string for each input, and the string of the output; or
        `None` if a rank is not known, or a label occurs twice in one of the strings.
    """
    equation = view.attribute("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    inputs, output = equation.split("->")
    counts = []
    for text, fact in zip(inputs.split(","), view.facts, strict=True):
        if fact.rank is None:
            return None
        counts.append(fact.rank - (len(text) - 3) if "..." in text else 0)
    *labels, output = (
        text.replace("...", _BATCH_LABELS[len(_BATCH_LABELS) - count :])
        for text, count in zip(
            [*inputs.split(","), output], [*counts, max(counts)], strict=True
        )
    )
    if any(len(set(text)) < len(text) for text in [*labels, output]):
        return None
    return labels, output


def _decide_from_labels(
    view: OperationView, inputs: Sequence[str], output: str
) -> Decision | None:
    """Decide how to build a contraction, from the labels of its axes.

    The result has rows if the rows' label is in `output`, or else it is a partial sum.
    The decision is `None` if a shape is not known, or if inputs differ in their numbers
    of entries for each row.

    Args:
        view: `OperationView` of the operation.
        inputs: Sequence of strings, the labels of the axes of each input, such as
            `["ik", "kj"]` for a matrix product.
        output: String, the labels of the axes of the output, such as `"ij"`.
    """
    if any(fact.sizes is None for fact in view.facts):
        return None
    row_labels = [
        text[fact.axis] if fact.is_rows else None
        for text, fact in zip(inputs, view.facts, strict=True)
    ]
    chosen = [label for label in row_labels if label is not None]
    # Inputs may have rows along axes of different labels. One label can stay divided:
    # preferably one of the output, whose rows then need no sum. Rows along axes of
    # other labels are gathered.
    label = next((own for own in chosen if own in output), chosen[0])
    multiples = {
        fact.multiple
        for fact, own in zip(view.facts, row_labels, strict=True)
        if own == label
    }
    if len(multiples) > 1:
        return None
    needs = [
        rows_along(text.index(label), may_broadcast=label in _BATCH_LABELS)
        if label in text
        else WHOLE
        for text in inputs
    ]
    shape = _output_sizes(inputs, output, view.facts)
    if label in output:
        return Decision(needs, [own_rows(shape, output.index(label))])
    return Decision(needs, [part(shape)])


def _output_sizes(
    inputs: Sequence[str], output: str, facts: Sequence[Fact]
) -> tuple[Size, ...]:
    """Return the shape of a contraction's output from the shapes of its inputs.

    Args:
        inputs: Sequence of strings, the labels of the axes of each input.
        output: String, the labels of the axes of the output.
        facts: Sequence of `Fact`, one for each input, with known sizes.
    """
    sizes: dict[str, Size] = {}
    for text, fact in zip(inputs, facts, strict=True):
        assert fact.sizes is not None
        for label, size in zip(text, fact.sizes, strict=True):
            known = sizes.get(label, ONE)
            if known == ONE or (known == FREE and size != ONE):
                sizes[label] = size
    return tuple(sizes[label] for label in output)
