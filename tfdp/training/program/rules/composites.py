"""Rules of operations that convert ragged or sparse tensors, which are whole, to rows.

The output has a row for each row of the batch: a replica slices its own rows. Rules
return `None` where they do not apply, or if the number of rows is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.training.program.facts import Form, own_rows, static_sizes, whole, with_rows
from tfdp.training.program.sizes import SPLITS, UNKNOWN, Size, array, number, rows
from tfdp.training.program.view import WHOLE, Decision, OperationView


def decide_composite(view: OperationView) -> Decision | None:
    """Decide how to build an operation on sparse or ragged tensors.

    Each replica has such tensors of the whole batch, and runs the operation on them. It
    slices its own rows of a dense output, and keeps a sparse output whole. The decision
    is `None` for another operation, if the number of rows is not known, or if an
    operation with a dense output has inputs that are not whole.
    """
    if view.type in _ROWS_OF_SPARSE:
        return _decide_sparse_output(view)
    if view.type not in _ROWS_OF_DENSE or not set(view.forms()) <= _REPLICATED:
        return None
    size = _ROWS_OF_DENSE[view.type](view)
    if size is None or size.kind != "rows" or size.number is None:
        return None
    shape = static_sizes(view.op.outputs[0], is_free=True)
    if shape is None:
        return None
    fact = own_rows(with_rows(shape, 0, size.number))
    return Decision([WHOLE] * len(view), [fact], _build_and_take_rows)


def _decide_sparse_output(view: OperationView) -> Decision | None:
    """Decide how replicas build an operation that creates a sparse, whole tensor.

    The decision records the number of rows in the output's dense shape; it is `None` if
    that number is not known.
    """
    size = _ROWS_OF_SPARSE[view.type](view)
    if size is None:
        return None
    outputs = view.whole_outputs()
    outputs[2] = whole(outputs[2].sizes, array([size, UNKNOWN]))
    return Decision([WHOLE] * len(view), outputs, is_whole=Form.ROWS in view.forms())


def _build_and_take_rows(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the operation on whole inputs, and slice this replica's rows.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    whole = builder.copy(op, replica_inputs)[0]
    whole.set_shape(op.outputs[0].shape)
    return [builder.take_rows(op.outputs[0], whole)]


def _rows_by_value(index: int) -> Callable[[OperationView], Size | None]:
    """Return a function that reads an output's number of rows from an input's value.

    The value of the operation's input number `index` is that number, or a shape that
    begins with it. The function takes an `OperationView`, and returns the number as a
    `Size`, or `None` if the value is not known.
    """

    def size(view: OperationView) -> Size | None:
        """Return the first element of input number `index`, or `None` if not known."""
        value = view.facts[index].value
        return None if value is None or not value.size else value.ravel()[0]

    return size


def _rows_of_first_input(view: OperationView) -> Size | None:
    """Return the number of rows of the first input as a `Size`; `None` if unknown."""
    shape = view.facts[0].sizes
    return shape[0] if shape else None


def _rows_by_splits(index: int) -> Callable[[OperationView], Size | None]:
    """Return a function that reads an output's number of rows from its row splits.

    The function takes an `OperationView`, whose input with this index has the row
    splits. It returns a `Size`, or `None` if they are not those of the batch.
    """

    def size(view: OperationView) -> Size | None:
        """Return the number of rows if the row splits are the batch's, or `None`."""
        return rows(1) if view.facts[index].sizes == (SPLITS,) else None

    return size


def _rows_by_partition(view: OperationView) -> Size | None:
    """Return the number of rows of a `RaggedTensorToTensor` as a `Size`, or `None`.

    It is `None` if neither the shape input nor the row partition has the number.
    """
    first = _rows_by_value(0)(view)
    if first != number(-1):
        return first
    kinds = view.attribute("row_partition_types")
    if kinds[0] in (b"FIRST_DIM_SIZE", "FIRST_DIM_SIZE"):
        return _rows_by_value(3)(view)
    return _rows_by_splits(3)(view)


# Each replica slices its own rows from the dense output of these operations. The plan
# needs the output's number of rows for that, which the functions return.
_ROWS_OF_DENSE: dict[str, Callable[[OperationView], Size | None]] = {
    "RaggedBincount": _rows_by_splits(0),
    "RaggedTensorToTensor": _rows_by_partition,
    "ScatterNd": _rows_by_value(2),
    "SparseBincount": _rows_by_value(2),
    "SparseTensorDenseMatMul": lambda view: (
        None if view.attribute("adjoint_a") else _rows_by_value(2)(view)
    ),
    "SparseToDense": _rows_by_value(1),
    "UnsortedSegmentMax": _rows_by_value(2),
    "UnsortedSegmentMin": _rows_by_value(2),
    "UnsortedSegmentProd": _rows_by_value(2),
    "UnsortedSegmentSum": _rows_by_value(2),
}
# The sparse output of these operations stays whole: indices, values and a dense shape
# of two axes. Later operations need its number of rows, which the functions return.
_ROWS_OF_SPARSE: dict[str, Callable[[OperationView], Size | None]] = {
    "DenseCountSparseOutput": lambda view: (
        _rows_of_first_input(view) if view.facts[0].rank == 2 else None
    ),
    "RaggedCountSparseOutput": _rows_by_splits(0),
    "SparseCountSparseOutput": _rows_by_value(2),
    "StringSplit": _rows_of_first_input,
    "StringSplitV2": _rows_of_first_input,
}
# Every replica has, or can compute, the whole value of an input of these forms, so it
# builds an operation on such inputs without a gather.
_REPLICATED = frozenset((Form.WHOLE, Form.SIZES))
