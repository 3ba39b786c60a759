"""Rules of operations that compute each row separately, and of their gradients."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdp.training.program.facts import Fact, Form, part
from tfdp.training.program.view import (
    AS_IS,
    WHOLE,
    Decision,
    NeededForm,
    OperationView,
    operations,
    rows_along,
    table,
)

# These operations compute each row of the inputs with the given indices separately.
# Other inputs, such as kernels, belong to all rows and are needed whole.
_INPUTS_WITH_ROWS: dict[str, tuple[int, ...]] = table(
    {
        """
        AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D
        BatchMatrixBandPart BiasAdd BiasAddGrad Cholesky Conv2D Conv3D DepthToSpace
        DepthwiseConv2dNative Dilation2D ExtractImagePatches FakeQuantWithMinMaxArgs
        FakeQuantWithMinMaxVars FFT FFT2D HSVToRGB IFFT IFFT2D IRFFT
        LogMatrixDeterminant LogSoftmax LRN
        MatrixBandPart MatrixDeterminant MatrixDiagPartV3 MatrixDiagV3 MatrixInverse
        MaxPool MaxPool3D MaxPoolV2 ResizeBicubic ResizeBilinear ResizeNearestNeighbor
        ResizeNearestNeighborGrad RFFT RGBToHSV SelfAdjointEigV2 Softmax SpaceToDepth
        Svd TopKV2
        """: (0,),
        """
        CholeskyGrad ImageProjectiveTransformV3 InTopKV2 MatrixSetDiagV3 MatrixSolve
        MatrixTriangularSolve ResizeBicubicGrad ResizeBilinearGrad
        SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
        """: (0, 1),
        """
        Conv2DBackpropFilter Conv3DBackpropFilterV2 DenseBincount
        DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter
        Dilation2DBackpropInput
        """: (0, 2),
        """
        LRNGrad MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad
        """: (0, 1, 2),
        "AvgPool3DGrad AvgPoolGrad LookupTableFindV2": (1,),
        """
        Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput
        """: (2,),
    }
)
# An operation combines entries along this many axes at the end, so none of them may be
# the axis of rows: 0 for a number, 2 for a matrix, 3 for an image. The default is 1,
# for a vector.
_NUM_INNER_AXES = table(
    {
        "InTopKV2 LookupTableFindV2 SparseSoftmaxCrossEntropyWithLogits": 0,
        """
        Cholesky CholeskyGrad LogMatrixDeterminant MatrixBandPart MatrixDeterminant
        MatrixDiagPartV3 MatrixInverse MatrixSetDiagV3 MatrixSolve
        MatrixTriangularSolve SelfAdjointEigV2 Svd FFT2D IFFT2D
        """: 2,
        """
        AdjustContrastv2 DepthToSpace ExtractImagePatches ResizeBicubic
        ResizeBicubicGrad ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor
        ResizeNearestNeighborGrad SpaceToDepth
        """: 3,
    }
)
# Convolutions and poolings fail on inputs without rows, so a replica without rows runs
# them on one row of zeros.
_WINDOWS = re.compile("Conv|Dilation|Pool")
# The gradient of weights is a sum over rows, so from its own rows each replica computes
# a partial sum.
_SUMS_OVER_ROWS = operations(
    """
    BiasAddGrad Conv2DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter
    """
)
# The first input of these gradients is the shape of their output. On a replica it must
# have the replica's own number of rows.
_SHAPE_IS_INPUT = operations(
    """
    AvgPool3DGrad AvgPoolGrad Conv2DBackpropInput Conv3DBackpropInputV2
    DepthwiseConv2dNativeBackpropInput
    """
)
# These operations combine entries along the last axis of the logits, that of the
# classes, so rows must lie along another one. The labels, one for each row, have no
# such axis.
_WITH_LABELS = frozenset(("InTopKV2", "SparseSoftmaxCrossEntropyWithLogits"))
# In these operations an input with one row broadcasts to all rows, so such an input is
# not sliced.
_BROADCASTING = operations(
    """
    ImageProjectiveTransformV3 MatrixTriangularSolve SoftmaxCrossEntropyWithLogits
    """
)
# In cuDNN's recurrent layers, LSTM and GRU, the batch may be the first or the second
# axis of the inputs with these indices. The lengths of sequences, input 4, are apart,
# because they always have rows along axis 0.
_RECURRENT = {
    "CudnnRNNV3": (0, 1, 2),
    "CudnnRNNBackpropV3": (0, 1, 2, 5, 6, 7, 8, 9, 10),
}
_SEQUENCE_LENGTHS = 4
# The output with this index has the shape and the rows of the first input. TensorFlow
# may not know that shape, so the `Fact` of the input is used for the output.
_SHAPED_LIKE_FIRST = table(
    {
        "LogSoftmax Softmax": 0,
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits": 1,
    }
)


def decide_row_by_row(view: OperationView) -> Decision | None:
    """Decide how to build an operation that treats each row alone.

    An example is a convolution. Each replica runs it on its own rows; gradients of
    weights are partial sums. The decision is `None` for another operation, or if it
    would combine rows.
    """
    if view.type not in _INPUTS_WITH_ROWS:
        return None
    indices = _INPUTS_WITH_ROWS[view.type]
    axis = _axis_of_rows(view, indices)
    if axis is None:
        return None
    rows = rows_along(axis, may_broadcast=view.type in _BROADCASTING)
    needs = [rows if index in indices else WHOLE for index in range(len(view))]
    if view.type in _SHAPE_IS_INPUT and view.facts[0].form is Form.SIZES:
        shape = view.facts[0].value
        if shape is None or not all(size.is_free for size in shape[1:]):
            return None
        needs[0] = AS_IS
    build = build_or_use_zero_row if _WINDOWS.search(view.type) else None
    if view.type in _SUMS_OVER_ROWS:
        return Decision(needs, [part(view.output_sizes())], build)
    multiple = next(f.multiple for f in view.facts if f.is_rows)
    outputs = [
        view.facts[0]
        if _SHAPED_LIKE_FIRST.get(view.type) == index and view.facts[0].is_rows
        else view.rows_output(axis, multiple, index)
        for index in range(len(view.op.outputs))
    ]
    return Decision(needs, outputs, build)


def decide_recurrent(view: OperationView) -> Decision | None:
    """Decide how to build a recurrent layer of cuDNN, which Keras uses on GPUs.

    Each replica runs it on its own rows. Scalars take the place of the second state,
    which a GRU does not have. What the forward pass reserves for its gradient stays on
    the replica. The decision is `None` for another operation, or if its inputs are not
    sharded by the same rows.
    """
    indices = _RECURRENT.get(view.type)
    if indices is None or not view.facts[0].is_rows:
        return None
    axis, multiple = int(view.attribute("time_major")), view.facts[0].multiple
    needs = [WHOLE if fact.form is not Form.LOCAL else AS_IS for fact in view.facts]
    for index in (*indices, _SEQUENCE_LENGTHS):
        fact, along = view.facts[index], axis if index in indices else 0
        if fact.is_rows and (fact.axis, fact.multiple) != (along, multiple):
            return None
        if view.op.inputs[index].shape.rank:
            needs[index] = rows_along(along)
    outputs = [
        view.rows_output(axis, multiple, index)
        if view.op.outputs[index].shape.rank == 3
        else Fact(Form.LOCAL)
        for index in range(len(view.op.outputs))
    ]
    if view.type == "CudnnRNNBackpropV3":
        outputs[3] = part(view.output_sizes(3))
    return Decision(needs, outputs, _build_recurrent)


def decide_reverse_sequence(view: OperationView) -> Decision | None:
    """Decide how replicas build a `ReverseSequence`: each reverses its own rows.

    The decision is `None` for another operation, or if the rows are not its batch axis.
    """
    if view.type != "ReverseSequence":
        return None
    sequences, lengths = view.facts
    axis = view.attribute("batch_dim")
    if not sequences.is_rows or sequences.axis != axis:
        return None
    if lengths.is_rows and lengths.multiple != sequences.multiple:
        return None
    return Decision([rows_along(axis), rows_along()], [sequences])


def _build_recurrent(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a recurrent layer of cuDNN or its gradient on this replica.

    cuDNN needs at least one row, so a replica without rows builds empty outputs.

    Returns:
        List of this replica's outputs of `op` from `replica_inputs`.
    """
    if not builder.may_be_empty:
        return builder.copy(op, replica_inputs)

    def without_rows() -> list[tf.Tensor]:
        """Return outputs without rows; the gradient of the weights is zeros."""
        if op.type == "CudnnRNNBackpropV3":
            return [tf.zeros_like(tensor) for tensor in replica_inputs[:4]]
        steps_and_rows = tf.shape(replica_inputs[0])[:2]
        size = op.outputs[0].shape[2]
        output = tf.zeros(tf.concat([steps_and_rows, [size]], 0), op.outputs[0].dtype)
        states = [tf.zeros_like(tensor) for tensor in replica_inputs[1:3]]
        reserved = [tf.zeros([0], tensor.dtype) for tensor in op.outputs[3:]]
        return [output, *states, *reserved]

    is_empty = tf.equal(builder.own_rows, 0)
    return tf.cond(is_empty, without_rows, lambda: builder.copy(op, replica_inputs))


def _axis_of_rows(view: OperationView, indices: tuple[int, ...]) -> int | None:
    """Return the axis of rows of an operation's inputs, or `None` if it mixes rows.

    It is `None` as well if the inputs differ in that axis, or if shapes are not known.
    `indices` are those of the inputs that may have rows.
    """
    own = [view.facts[index] for index in indices if view.facts[index].is_rows]
    others = [f for i, f in enumerate(view.facts) if f.is_rows and i not in indices]
    ranks = [tensor.shape.rank for tensor in view.op.outputs]
    is_known = None not in ranks or view.type in _SUMS_OVER_ROWS
    if not own or own[0].sizes is None or others or not is_known:
        return None
    axis = own[0].axis
    if _mixes_axis(view, axis):
        return None
    if any(fact.form_and_axis() != own[0].form_and_axis() for fact in own):
        return None
    if len({fact.multiple for fact in own}) > 1:
        return None
    return (
        None if axis >= len(own[0].sizes) - _NUM_INNER_AXES.get(view.type, 1) else axis
    )


def _mixes_axis(view: OperationView, axis: int) -> bool:
    """Return whether an operation combines entries along `axis`, the axis of rows.

    `_axis_of_rows` checks the last axes, whose number is in `_NUM_INNER_AXES`.
    """
    if _WINDOWS.search(view.type) or view.type.startswith(("BiasAdd", "ImageProj")):
        return axis > 0
    first = view.facts[0]
    if view.type in _WITH_LABELS and first.is_rows:
        return axis == len(first.sizes or ()) - 1
    is_solved = view.type == "MatrixTriangularSolve"
    return is_solved and first.rank != view.facts[1].rank


def build_or_use_zero_row(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a convolution, pooling or padding, which fails on a tensor without rows.

    On a replica without rows it runs on one row of zeros.

    With oneDNN, in float32 on CPUs, a convolution of no rows returns the shape of its
    input, and the gradient of a pooling ends the process. Seen with TensorFlow 2.19 to
    2.21; tests/keras_hooks/cases_normalization.py guards it.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    replica_inputs = _with_own_rows_in_shape(builder, op, replica_inputs)
    if not builder.may_be_empty:
        return builder.copy(op, replica_inputs)
    facts = builder.facts_of(op.inputs)
    (fact,) = builder.facts_of(op.outputs)

    def without_rows() -> tf.Tensor:
        """Return the output for no rows, computed with one row of zeros."""
        with_one_row = [
            _one_row_of_zeros(tensor)
            if builder.need(op, index).kind is NeededForm.ROWS
            else _shape_of_one_row(tensor)
            if own.form is Form.SIZES or (index == 0 and op.type in _SHAPE_IS_INPUT)
            else tensor
            for index, (tensor, own) in enumerate(
                zip(replica_inputs, facts, strict=True)
            )
        ]
        result = builder.copy(op, with_one_row)[0]
        return result[:0] if fact.is_rows else tf.zeros_like(result)

    result = tf.cond(
        tf.equal(builder.own_rows, 0),
        without_rows,
        lambda: builder.copy(op, replica_inputs)[0],
    )
    return [builder.with_shape(result, op.outputs[0], fact)]


def _with_own_rows_in_shape(builder: Any, op: Any, replica_inputs: list) -> list:
    """Return an operation's inputs on a replica, with its rows in a shape input.

    The first input of some gradients, such as `Conv2DBackpropInput`, is the shape of
    their output. In a step with a fixed number of rows this shape may be a constant
    with the number of rows of all replicas, which is replaced by the replica's own.
    All other inputs, and those of other operations, are returned unchanged.

    Args:
        builder: `Builder` of the replica's program.
        op: `tf.Operation` of the program.
        replica_inputs: List of tensors, the inputs of `op` on the replica; the last has
            the replica's rows.

    Returns:
        List of tensors like `replica_inputs`.
    """
    form = builder.fact(op.inputs[0]).form
    if op.type not in _SHAPE_IS_INPUT or form is Form.SIZES:
        return replica_inputs
    own_rows = tf.shape(replica_inputs[-1], out_type=replica_inputs[0].dtype)[:1]
    return [tf.concat([own_rows, replica_inputs[0][1:]], 0), *replica_inputs[1:]]


def _one_row_of_zeros(tensor: tf.Tensor) -> tf.Tensor:
    """Return zeros in the shape of a tensor, but with one row."""
    return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)


def _shape_of_one_row(shape: tf.Tensor) -> tf.Tensor:
    """Return a shape tensor with its first entry, the number of rows, set to one."""
    return tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0)
