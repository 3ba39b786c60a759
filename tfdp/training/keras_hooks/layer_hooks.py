"""Losses and layers under several replicas: scales, moments, convolutions, seeds.

Each function in the table of `tfdp.training.keras_hooks.install` replaces a Keras
function. It receives that function as `original`, before the function's own arguments,
and only calls it if no tfdp strategy is active.

Keras's steps are traced as the program of one device, and `tfdp.training.program` then
divides the program among the replicas. `program_trace.current()` is not `None` during
such a trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import step_events
from tfdp.ground._compat import owners, programs, runtime
from tfdp.ground.base import loops, program_trace, step_context, xla
from tfdp.ground.base.context import (
    in_tfdp_scope,
    is_tfdp,
    outside_tfdp_scope,
    replica_context,
)
from tfdp.training.reduction.training_group import training_group

# The difference between the seeds of consecutive ranks. It is odd, so that its
# multiples differ modulo 2**32, and far larger than the increments of a seed's counter.
_SEED_STRIDE = 1_000_003


def reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    """Reduce loss values; divide a scalar mean by the number of replicas.

    Keras divides the means that it computes, but not a scalar mean that a loss function
    returns, so the sum over replicas would be too large.

    Args:
        original: Callable, the `reduce_values` of Keras.
        values: Tensor of losses, or the scalar that a loss function has returned.
        sample_weight: Tensor or `None`, as in `original`. Defaults to `None`.
        reduction: String or `None`, as in a loss. Defaults to `"sum_over_batch_size"`.

    Returns:
        Tensor like the result of `original`.
    """
    result = original(values, sample_weight, reduction)
    is_mean = reduction not in (None, "none", "sum")
    is_traced = program_trace.current() is not None
    if is_traced or not in_tfdp_scope() or not is_mean or tuple(values.shape):
        return result
    # Keras divides its own means by the number of replicas, but not a scalar mean that
    # a loss function returns. So that scalar is divided here.
    return owners.keras_loss.scale_loss_for_distribution(result)


def scale_loss(original: Callable, value: Any) -> Any:
    """Divide a loss by the number of replicas, by Keras's function.

    While a step is traced as on one device, and where no replica runs, in the scope
    outside of `strategy.run`, the loss is returned unchanged.

    Args:
        original: Callable, `scale_loss_for_distribution` of Keras.
        value: Tensor, the loss.

    Returns:
        Tensor like `value`.
    """
    if program_trace.current() is not None:
        return value
    with outside_tfdp_scope():
        return original(value)


def unscale_loss(original: Callable, value: Any) -> Any:
    """Multiply a loss by the number of replicas, by Keras's function.

    While a step is traced as on one device, the loss is returned unchanged. The time at
    which the loss is computed is recorded as the end of the replica's forward pass.

    Args:
        original: Callable, `unscale_loss_for_distribution` of Keras.
        value: Tensor, the loss.

    Returns:
        Tensor like `value`.
    """
    if (trace := program_trace.current()) is not None:
        trace.add([value], lambda given: step_events.record_loss(given[0]), "as is")
        return value
    step_events.record_loss(value)
    with outside_tfdp_scope():
        return original(value)


def moments(original: Callable, x: Any, axes: Any, keepdims: bool) -> Any:
    """Compute the moments of a global batch by one all-reduce, where Keras uses three.

    Outside of replicas, Keras's function `original` computes them. `x`, `axes` and
    `keepdims` are those of `keras.ops.moments`.

    Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, over the
    global batch.

    Returns:
        Tuple of the mean and the variance.
    """
    context = replica_context()
    if context is None:
        return original(x, axes, keepdims)
    total = tf.reduce_sum(x, axis=axes, keepdims=True)
    squares = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
    count = tf.reduce_sum(tf.ones_like(x), axis=axes, keepdims=True)
    sums = [total, squares, count]
    if program_trace.current() is None:
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    else:
        # The replicas that run the traced program sum the marked tensors over all
        # replicas. Three marks without operations between them share one all-reduce.
        sums = [programs.marked(part, "whole") for part in sums]
    total, squares, count = sums
    mean = tf.math.divide_no_nan(total, count)
    mean_of_squares = tf.math.divide_no_nan(squares, count)
    variance = tf.maximum(mean_of_squares - tf.square(mean), 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def masked_moments(original: Callable, layer: Any, inputs: Any, mask: Any) -> Any:
    """Compute a layer's masked moments, over the global batch if it is synchronized.

    Keras's method `original` computes them over the replica's samples. As in Keras
    there are two passes: the mean, then the squared deviations from it.

    Returns:
        Tuple of the mean and the variance.
    """
    is_synchronized = _is_synchronized(layer)
    if (trace := program_trace.current()) is not None:
        if is_synchronized or trace.is_eager:
            return original(layer, inputs, mask)
        return _moments_per_replica(original, layer, inputs, mask)
    context = replica_context()
    if context is not None and is_synchronized and not layer.synchronized:
        mask = tf.ones(tf.shape(inputs)[:-1], tf.bool) if mask is None else mask
    if context is None or mask is None or not is_synchronized:
        return original(layer, inputs, mask)
    kept = [axis % inputs.shape.rank for axis in layer.input_spec.axes]
    axes = [axis for axis in range(inputs.shape.rank) if axis not in kept]
    reduce_op = tf.distribute.ReduceOp.SUM
    is_kept = tf.cast(mask, tf.bool)[..., tf.newaxis]
    is_kept = tf.broadcast_to(is_kept, tf.shape(inputs))
    zeros = tf.zeros_like(inputs)
    total = tf.reduce_sum(tf.where(is_kept, inputs, zeros), axis=axes, keepdims=True)
    count = tf.reduce_sum(tf.cast(is_kept, inputs.dtype), axis=axes, keepdims=True)
    total, count = context.all_reduce(reduce_op, [total, count])
    # As in Keras, epsilon avoids a division by zero if the mask keeps no sample.
    count += keras.config.epsilon()
    mean = total / count
    around_mean = tf.square(tf.where(is_kept, inputs - mean, zeros))
    squares = tf.reduce_sum(around_mean, axis=axes, keepdims=True)
    variance = context.all_reduce(reduce_op, squares) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def normalize(
    original: Callable, layer: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Call a `BatchNormalization`; in an eager step, on each replica's rows separately.

    An eager step runs on the rows of all replicas. The moving statistics become the
    mean over replicas, weighted by rows. `original` is the `call` of the layer, with
    the other arguments.

    Returns:
        Tensor like `inputs`, the normalized rows.
    """
    trace = program_trace.current()
    is_eager = trace is not None and trace.is_eager
    counts = trace.row_counts if is_eager else []  # type: ignore[union-attr]
    is_local = bool(training) and layer.trainable and not _is_synchronized(layer)
    if len(counts) < 2 or not is_local:
        return original(layer, inputs, training=training, mask=mask)
    each, begin, outputs = inputs.shape[0] // sum(counts), 0, []
    statistics = list(layer.non_trainable_variables)
    before = [tf.convert_to_tensor(variable) for variable in statistics]
    means = [tf.zeros_like(value) for value in before]
    for count in filter(None, counts):
        own = slice(begin, begin + count * each)
        begin = own.stop
        masked = None if mask is None else mask[own]
        for variable, value in zip(statistics, before, strict=True):
            variable.assign(value)
        outputs.append(original(layer, inputs[own], training=training, mask=masked))
        for index, variable in enumerate(statistics):
            means[index] += tf.convert_to_tensor(variable) * (count / sum(counts))
    for variable, mean in zip(statistics, means, strict=True):
        variable.assign(mean)
    return tf.concat(outputs, axis=0)


def _is_synchronized(layer: Any) -> bool:
    """Return whether a layer or the strategy's options request global moments."""
    strategy = tf.distribute.get_strategy()
    by_option = is_tfdp(strategy) and strategy.extended.options.sync_batch_norm
    return layer.synchronized or by_option


def rematerialize(original: Callable, function: Callable) -> Callable:
    """Wrap a function so that the backward pass computes it again.

    Keras's `remat`, here `original`, rejects keyword arguments in a graph; the returned
    function takes them.
    """
    if not is_tfdp(tf.distribute.get_strategy()):
        return original(function)

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        """Return the function's result, which the backward pass computes again."""

        @functools.wraps(function)
        def with_keywords(*inputs: Any) -> Any:
            """Return the function's result for `inputs` and the outer keywords."""
            return function(*inputs, **kwargs)

        return original(with_keywords)(*args)

    return compute


def pad_empty_batch(original: Callable, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Convolve or pool a zero row in place of an empty batch, and drop the result.

    `original` is Keras's function, called with all other arguments.

    For an input without rows TensorFlow's oneDNN convolutions, in float32 on CPUs,
    return the shape of the input, and later layers fail; the gradient of pooling ends
    the process. Observed with TensorFlow 2.19 to 2.21, and covered by
    tests/keras_hooks/cases_normalization.py.

    Returns:
        Tensor, the result for `inputs`.
    """
    if not _may_be_empty(inputs):
        return original(inputs, *args, **kwargs)
    is_empty = tf.equal(tf.shape(inputs)[0], 0)

    def one_row() -> tf.Tensor:
        """Return one row of zeros, of shape `[1, *inputs.shape[1:]]`.

        The gradient with respect to `inputs` has no rows, since `inputs` has none here.
        """
        return tf.pad(inputs, [[1, 0], *[[0, 0]] * (len(inputs.shape) - 1)])

    padded = tf.cond(is_empty, one_row, lambda: tf.identity(inputs))
    # Inputs that may be empty have the static number of rows 0, or none. An empty batch
    # is padded to one row, so a static number of 0 would be wrong and is removed.
    padded = tf.ensure_shape(padded, [None, *inputs.shape[1:]])
    result = original(padded, *args, **kwargs)
    unpadded = tf.cond(is_empty, lambda: result[:0], lambda: tf.identity(result))
    return tf.ensure_shape(unpadded, [None, *result.shape[1:]])


def _may_be_empty(inputs: Any) -> bool:
    """Return whether inputs may have no rows, and convolution or pooling would fail.

    They fail on CPUs without XLA. Inputs may have no rows on one of several replicas,
    unless their static number of rows is positive, or the step is traced as on one
    device.
    """
    context = replica_context()
    if context is None or context.num_replicas_in_sync == 1 or xla.is_tracing():
        return False
    if program_trace.current() is not None:
        return False
    rows = tf.convert_to_tensor(inputs).shape[0]
    device = tf.distribute.get_strategy().extended.group.devices[0]
    return not rows and runtime.device_type(device) == "CPU"


def draw_seed(original: Callable, seed: Any) -> Any:
    """Return a Keras seed plus an offset, so that replicas draw different numbers.

    Keras's function `original` draws the seed from `seed`, such as a `SeedGenerator`.
    The offset of rank 0 is zero. A step that is traced as on one device has one seed,
    and so has an optimizer's update, after which all replicas have the same weights.

    Returns:
        Integer tensor of shape `[2]`, the seed.
    """
    drawn = original(seed)
    if (trace := program_trace.current()) is not None:
        if loops.independent_groups() is not None:
            drawn += _seed_of_group(trace, drawn.dtype)
        return drawn
    context = replica_context()
    if context is None or step_context.current().update_draws is not None:
        return drawn
    rank = context.replica_id_in_sync_group
    return drawn + tf.cast(tf.stack([rank * _SEED_STRIDE, 0]), drawn.dtype)


def _seed_of_group(trace: Any, dtype: tf.DType) -> tf.Tensor:
    """Return an offset of seeds, by which groups of replicas draw different numbers.

    Groups are those that update independently. The offset is a multiple of the first
    rank of the group, so zero for the group of rank 0.

    Args:
        trace: `ProgramTrace` of the program that the replicas of the group run.
        dtype: `tf.DType` of seeds.

    Returns:
        Tensor of shape `[2]`, to add to a seed of Keras.
    """

    def read() -> tf.Tensor:
        """Return the offset of the seed for the replicas that run this program."""
        group = training_group(tf.distribute.get_strategy())
        return tf.constant([group.ranks[0] * _SEED_STRIDE, 0], dtype)

    return read() if trace.is_eager else trace.read([2], dtype, read)


def _moments_per_replica(
    original: Callable, layer: Any, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """Compute the moments of each replica's rows, in a step traced as on one device.

    Marks on tensors show `tfdp.training.program` which values belong to one replica,
    and which to all. `original` is the method of the `BatchNormalization` that computes
    them from `inputs` and `mask`.

    Returns:
        Tuple of the mean and the variance, marked as those of a replica.
    """

    @tf.custom_gradient
    def enter(rows: tf.Tensor) -> Any:
        """Mark rows as a replica's own, and their gradients as row-sharded again.

        A mark is an attribute of an identity operation. When `tfdp.training.program`
        plans the program, tensors after the first mark are values of one replica, and
        a gradient after the second holds a replica's rows of the global batch.

        Returns:
            Tuple of the marked rows, and a function from a gradient to a marked one.
        """
        own = programs.marked(rows, "rows of a replica")
        return own, lambda upstream: programs.marked(upstream, "rows of all")

    @tf.custom_gradient
    def leave(moment: tf.Tensor) -> Any:
        """Mark a moment, and also its gradient, as a replica's own.

        The gradient is a partial sum, and the mark keeps the replicas from summing it.

        Returns:
            Tuple of the marked moment, and a function from a gradient to a marked one.
        """
        own = programs.marked(moment, "moment of a replica")
        return own, lambda upstream: programs.marked(upstream, "part of a replica")

    if mask is not None:
        mask = programs.marked(tf.convert_to_tensor(mask), "rows of a replica")
    mean, variance = original(layer, enter(inputs), mask)
    return leave(mean), leave(variance)
