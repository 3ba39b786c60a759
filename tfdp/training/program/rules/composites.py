"""Rules of operations that make rows of ragged or sparse tensors, which are whole.

What comes out has a row for each of the batch: a replica takes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.training.program.facts import Form, own_rows, static_sizes, whole, with_rows
from tfdp.training.program.sizes import SPLITS, UNKNOWN, Size, array, number, rows
from tfdp.training.program.view import WHOLE, Decision, View


def decide_composite(view: View) -> Decision | None:
    """Decide an operation that makes rows of ragged or sparse tensors, or these."""
    if view.type in _SHAPES:
        return _decide_maker(view)
    if view.type not in _FIRST_SIZES or not set(view.forms()) <= _ALIKE:
        return None
    size = _FIRST_SIZES[view.type](view)
    if size is None or size.kind != "rows" or size.number is None:
        return None
    found = static_sizes(view.op.outputs[0], is_free=True)
    if found is None:
        return None
    fact = own_rows(with_rows(found, 0, size.number))
    return Decision([WHOLE] * len(view), [fact], _build_and_take_rows)


def _decide_maker(view: View) -> Decision | None:
    """Decide an operation that makes a whole sparse tensor, of as many rows."""
    size = _SHAPES[view.type](view)
    if size is None:
        return None
    outputs = view.whole_outputs()
    outputs[2] = whole(outputs[2].sizes, array([size, UNKNOWN]))
    return Decision([WHOLE] * len(view), outputs, is_whole=Form.ROWS in view.forms())


def _build_and_take_rows(builder: Any, op: Any, inputs: list) -> list:
    found = builder.copy(op, inputs)[0]
    found.set_shape(op.outputs[0].shape)
    return [builder.take_rows(op.outputs[0], found)]


def _first_value(index: int) -> Callable[[View], Size | None]:
    """Return the first number of an input, such as a shape."""

    def size(view: View) -> Size | None:
        value = view.facts[index].value
        return None if value is None or not value.size else value.ravel()[0]

    return size


def _first_size(view: View) -> Size | None:
    """Return the first size of the first input."""
    found = view.facts[0].sizes
    return found[0] if found else None


def _of_splits(index: int) -> Callable[[View], Size | None]:
    """Return the number of rows that an input has row splits of."""

    def size(view: View) -> Size | None:
        return rows(1) if view.facts[index].sizes == (SPLITS,) else None

    return size


def _of_partition(view: View) -> Size | None:
    """Return the number of rows of a ragged tensor that becomes a dense one."""
    first = _first_value(0)(view)
    if first != number(-1):
        return first
    kinds = view.attribute("row_partition_types")
    if kinds[0] in (b"FIRST_DIM_SIZE", "FIRST_DIM_SIZE"):
        return _first_value(3)(view)
    return _of_splits(3)(view)


def _of_product(view: View) -> Size | None:
    return None if view.attribute("adjoint_a") else _first_value(2)(view)


# The first size of what an operation returns.
_FIRST_SIZES: dict[str, Callable[[View], Size | None]] = {
    "RaggedBincount": _of_splits(0),
    "RaggedTensorToTensor": _of_partition,
    "ScatterNd": _first_value(2),
    "SparseBincount": _first_value(2),
    "SparseTensorDenseMatMul": _of_product,
    "SparseToDense": _first_value(1),
    "UnsortedSegmentMax": _first_value(2),
    "UnsortedSegmentMin": _first_value(2),
    "UnsortedSegmentProd": _first_value(2),
    "UnsortedSegmentSum": _first_value(2),
}
# The number of rows of the sparse tensor that an operation makes: of three outputs the
# last is its shape, of two axes.
_SHAPES: dict[str, Callable[[View], Size | None]] = {
    "DenseCountSparseOutput": lambda view: (
        _first_size(view) if view.facts[0].rank == 2 else None
    ),
    "RaggedCountSparseOutput": _of_splits(0),
    "SparseCountSparseOutput": _first_value(2),
    "StringSplit": _first_size,
    "StringSplitV2": _first_size,
}
_ALIKE = frozenset((Form.WHOLE, Form.SIZES))
