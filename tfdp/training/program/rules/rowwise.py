"""Rules of operations that compute each row by itself, or sum over rows by windows."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfdp.training.program.facts import Form, part
from tfdp.training.program.view import (
    AS_HELD,
    WHOLE,
    Decision,
    Kind,
    View,
    operations,
    rows_along,
    table,
)

# The inputs that have rows; others are the same for all.
_ROWS: dict[str, tuple[int, ...]] = table(
    {
        """
        AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D
        BatchMatrixBandPart BiasAdd BiasAddGrad Cholesky Conv2D Conv3D DepthToSpace
        DepthwiseConv2dNative Dilation2D FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
        FFT FFT2D HSVToRGB IFFT IFFT2D IRFFT LogMatrixDeterminant LogSoftmax LRN
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
# Axes at the end that belong to one row: a number, a matrix, an image. Others have 1.
_INNER = table(
    {
        "InTopKV2 LookupTableFindV2 SparseSoftmaxCrossEntropyWithLogits": 0,
        """
        Cholesky CholeskyGrad LogMatrixDeterminant MatrixBandPart MatrixDeterminant
        MatrixDiagPartV3 MatrixInverse MatrixSetDiagV3 MatrixSolve
        MatrixTriangularSolve SelfAdjointEigV2 Svd FFT2D IFFT2D
        """: 2,
        """
        AdjustContrastv2 DepthToSpace ResizeBicubic ResizeBicubicGrad ResizeBilinear
        ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad SpaceToDepth
        """: 3,
    }
)
# Convolutions and poolings, of which a replica may have no rows.
_WINDOWS = re.compile("Conv|Dilation|Pool")
# They sum over the rows.
_SUMS = operations(
    """
    BiasAddGrad Conv2DBackpropFilter Conv3DBackpropFilterV2
    DepthwiseConv2dNativeBackpropFilter Dilation2DBackpropFilter
    """
)
# Gradients whose first input is the shape of their output.
_SHAPED = operations(
    """
    AvgPool3DGrad AvgPoolGrad Conv2DBackpropInput Conv3DBackpropInputV2
    DepthwiseConv2dNativeBackpropInput
    """
)
_OF_CLASSES = frozenset(("InTopKV2", "SparseSoftmaxCrossEntropyWithLogits"))
# Of these an input may have one row for all.
_BROADCASTING = operations(
    """
    ImageProjectiveTransformV3 MatrixTriangularSolve SoftmaxCrossEntropyWithLogits
    """
)
# The output that has the shape of the first input, where TensorFlow may not know it.
_SHAPED_LIKE_FIRST = table(
    {
        "LogSoftmax Softmax": 0,
        "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits": 1,
    }
)


def decide_row_by_row(view: View) -> Decision | None:
    """Decide an operation that computes each row by itself."""
    if view.type not in _ROWS:
        return None
    indices = _ROWS[view.type]
    axis = _axis_of_rows(view, indices)
    if axis is None:
        return None
    rows = rows_along(axis, may_broadcast=view.type in _BROADCASTING)
    needs = [rows if index in indices else WHOLE for index in range(len(view))]
    if view.type in _SHAPED and view.facts[0].form is Form.SIZES:
        shape = view.facts[0].value
        if shape is None or not all(size.is_free for size in shape[1:]):
            return None
        needs[0] = AS_HELD
    build = build_with_a_row if _WINDOWS.search(view.type) else None
    if view.type in _SUMS:
        return Decision(needs, [part(view.output_sizes())], build)
    multiple = next(f.multiple for f in view.facts if f.is_rows)
    outputs = [
        view.facts[0]
        if _SHAPED_LIKE_FIRST.get(view.type) == index and view.facts[0].is_rows
        else view.rows_output(axis, multiple, index)
        for index in range(len(view.op.outputs))
    ]
    return Decision(needs, outputs, build)


def _axis_of_rows(view: View, indices: tuple[int, ...]) -> int | None:
    """Return the axis of rows, if each row is computed by itself."""
    own = [view.facts[index] for index in indices if view.facts[index].is_rows]
    others = [f for i, f in enumerate(view.facts) if f.is_rows and i not in indices]
    ranks = [tensor.shape.rank for tensor in view.op.outputs]
    is_known = None not in ranks or view.type in _SUMS
    if not own or own[0].sizes is None or others or not is_known:
        return None
    axis = own[0].axis
    if _has_rows_within(view, axis):
        return None
    if any(fact.held() != own[0].held() for fact in own):
        return None
    if len({fact.multiple for fact in own}) > 1:
        return None
    return None if axis >= len(own[0].sizes) - _INNER.get(view.type, 1) else axis


def _has_rows_within(view: View, axis: int) -> bool:
    """Return whether rows lie along an axis of what is computed at once."""
    if _WINDOWS.search(view.type) or view.type.startswith(("BiasAdd", "ImageProj")):
        return axis > 0
    first = view.facts[0]
    if view.type in _OF_CLASSES and first.is_rows:
        return axis == len(first.sizes or ()) - 1
    is_solved = view.type == "MatrixTriangularSolve"
    return is_solved and first.rank != view.facts[1].rank


def build_with_a_row(builder: Any, op: Any, inputs: list) -> list:
    """Build a convolution or a pooling, of which a replica may have no rows.

    By oneDNN, in float32 on CPUs, a convolution returns the shape of its input where
    that has no rows, and the gradient of a pooling ends the process. Such a replica
    computes with a row of zeros. Seen with TensorFlow 2.19 to 2.21;
    tests/keras_hooks/cases_normalization.py guards it.
    """
    inputs = _with_own_shape(builder, op, inputs)
    if not builder.may_be_empty:
        return builder.copy(op, inputs)
    facts = builder.facts_of(op.inputs)
    (fact,) = builder.facts_of(op.outputs)

    def empty() -> tf.Tensor:
        fed = [
            _one_row_of_zeros(tensor)
            if builder.need(op, index).kind is Kind.ROWS
            else _one_row_in(tensor)
            if own.form is Form.SIZES or (index == 0 and op.type in _SHAPED)
            else tensor
            for index, (tensor, own) in enumerate(zip(inputs, facts, strict=True))
        ]
        result = builder.copy(op, fed)[0]
        return result[:0] if fact.is_rows else tf.zeros_like(result)

    result = tf.cond(
        tf.equal(builder.own_rows, 0), empty, lambda: builder.copy(op, inputs)[0]
    )
    return [builder.with_shape(result, op.outputs[0], fact)]


def _with_own_shape(builder: Any, op: Any, inputs: list) -> list:
    """Return the inputs, with the replica's own rows in the shape of the output.

    It is a constant where a step knows the number of rows, as of noise that it makes.
    """
    form = builder.fact(op.inputs[0]).form
    if op.type not in _SHAPED or form is Form.SIZES:
        return inputs
    own_rows = tf.shape(inputs[-1], out_type=inputs[0].dtype)[:1]
    return [tf.concat([own_rows, inputs[0][1:]], 0), *inputs[1:]]


def _one_row_of_zeros(tensor: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(tensor)[1:]], 0), tensor.dtype)


def _one_row_in(shape: tf.Tensor) -> tf.Tensor:
    return tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0)
