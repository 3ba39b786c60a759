"""Losses, statistics and seeds where Keras counts replicas wrongly.

Each function takes the place of one of Keras, is called with the original
first, and hands over to it where no tfdp strategy is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.base import batch_weight
from tfdp.base.ownership import in_force, replica_context
from tfdp.collectives import step_events
from tfdp.losses import terms
from tfdp.losses.row_forms.form import CONSTANT, ROWS
from tfdp.reduction.reducer import is_reducing_gradients

# An odd number far from the increments of the counter beside it.
_SEED_STRIDE = 1_000_003
# Each replica is traced in its own thread.
_thread = threading.local()


def install() -> None:
    """Puts the functions in place; again has no effect."""
    _compat.replace(_compat.keras_nn, "_compute_moments_sync", _moments)
    _compat.replace(tf.GradientTape, "gradient", terms.gradient)
    _compat.replace(tf.nn, "compute_average_loss", _average_loss)
    _compat.replace(tf.nn, "scale_regularization_loss", _scale_regularization)
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        _compat.replace(metric, "update_state", _update_by_rows)
    _compat.replace(tf.distribute.ReplicaContext, "all_reduce", _all_reduce)
    layer = keras.layers.BatchNormalization
    _compat.replace(layer, "_moments", _moments_of_masked)
    for name in ("conv", "depthwise_conv", "separable_conv"):
        _compat.replace(_compat.keras_nn, name, _convolve)
    _compat.replace(_compat.keras_loss, "reduce_values", _reduce_values)
    _compat.replace(_compat.CompileLoss, "__call__", _compiled_loss)
    _compat.replace(_compat.keras_loss, "apply_mask", _apply_mask)
    _compat.replace(_compat.keras_loss, "scale_loss_for_distribution", _scale_loss)
    _compat.replace(_compat.keras_loss, "unscale_loss_for_distribution", _unscale_loss)
    for module in _compat.KERAS_RANDOM_MODULES:
        _compat.replace(module, "draw_seed", _draw_seed)


def _all_reduce(
    original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Passes gradients back so that each replica's loss counts by its rows.

    What replicas have together, such as synchronized moments, carries the gradients of
    all their losses to each replica, whose optimizer multiplies them by its own weight.
    """
    flat = tf.nest.flatten(value)
    is_plain = all(isinstance(x, tf.Tensor) and x.dtype.is_floating for x in flat)
    if batch_weight.current() is None or is_reducing_gradients() or not is_plain:
        return original(context, reduce_op, value, options)

    @tf.custom_gradient
    def reduce(*tensors: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            weight = batch_weight.weight_of_upstream()
            if weight is None:
                return original(context, reduce_op, list(upstream), options)
            parts = [x * tf.cast(weight, x.dtype) for x in upstream]
            totals = original(context, reduce_op, parts, options)
            return [tf.math.divide_no_nan(t, tf.cast(weight, t.dtype)) for t in totals]

        return tuple(original(context, reduce_op, list(tensors), options)), gradient

    results = reduce(*flat)
    for result in results:
        terms.note(result, CONSTANT)
    return tf.nest.pack_sequence_as(value, results)


def _moments(original: Callable, x: Any, axes: Any, keepdims: bool) -> Any:
    context = replica_context()
    if context is None:
        return original(x, axes, keepdims)
    return synchronized_moments(context, x, axes, keepdims)


def _moments_of_masked(original: Callable, layer: Any, inputs: Any, mask: Any) -> Any:
    """Keras takes them over the replica's own samples, also if synchronized."""
    context = replica_context()
    if context is None or mask is None or not layer.synchronized:
        moments = original(layer, inputs, mask)
        for moment in moments:
            # Where they are the replica's own, that is what the layer is told to do.
            terms.note(moment, CONSTANT)
        return moments
    kept = [axis % inputs.shape.rank for axis in layer.input_spec.axes]
    axes = [axis for axis in range(inputs.shape.rank) if axis not in kept]
    return synchronized_masked_moments(context, inputs, mask, axes)


def _convolve(original: Callable, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a replica without samples a row to convolve, and no row back.

    TensorFlow's convolutions by oneDNN, in float32 on CPUs, return the shape of
    their input where that has no rows, and the layers behind them fail. Seen with
    TensorFlow 2.19 to 2.21; tests/keras_hooks/cases_normalization.py guards it.
    """
    if not _may_be_empty(inputs):
        return original(inputs, *args, **kwargs)
    is_empty = tf.equal(tf.shape(inputs)[0], 0)

    def one_row() -> tf.Tensor:
        shape = tf.concat([[1], tf.shape(inputs)[1:]], axis=0)
        return tf.zeros(shape, inputs.dtype)

    fed = tf.cond(is_empty, one_row, lambda: tf.identity(inputs))
    result = original(tf.ensure_shape(fed, inputs.shape), *args, **kwargs)
    kept = tf.cond(is_empty, lambda: result[:0], lambda: tf.identity(result))
    return tf.ensure_shape(kept, result.shape)


def _may_be_empty(inputs: Any) -> bool:
    context = replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return False
    rows = tf.convert_to_tensor(inputs).shape[0]
    device = tf.distribute.get_strategy().extended.group.devices[0]
    return not rows and _compat.device_type(device) == "CPU"


def _reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    result = original(values, sample_weight, reduction)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        result = result * _global_mean_correction(sample_weight, result.dtype)
    is_mean = reduction not in (None, "none", "sum")
    is_scalar = tuple(values.shape) == ()
    if reduction == "sum" and not is_scalar and _is_compiled():
        return _as_mean(result)
    if in_force() and is_mean and is_scalar:
        # A loss function that takes the mean itself: Keras returns such a value
        # before it divides by the number of replicas.
        return _compat.keras_loss.scale_loss_for_distribution(result)
    if is_mean and not is_scalar:
        terms.note_mean(result, values)
    return result


def _compiled_loss(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The losses of `compile`, of which nothing else is computed than their sum."""
    _thread.is_compiled = True
    try:
        return original(*args, **kwargs)
    finally:
        _thread.is_compiled = False


def _is_compiled() -> bool:
    return getattr(_thread, "is_compiled", False)


def _as_mean(total: Any) -> Any:
    """A sum over a replica's rows as the mean whose weighted sum is that of all."""
    weight = batch_weight.current()
    if weight is None:
        return total
    mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
    terms.note_mean(mean)
    return mean


def _apply_mask(
    original: Callable, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    weights = original(sample_weight, mask, dtype, reduction)
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    weights = weights * _global_mean_correction(mask, dtype)
    terms.note(weights, ROWS)
    return weights


def _global_mean_correction(weights: Any, dtype: Any) -> Any:
    """What turns a mean over a replica's weights into one over everybody's.

    Keras divides by the replica's own sum of weights, or of a mask, and then
    the replica counts by its share of the samples. The mean over the global
    batch divides by the sum of all replicas' weights.
    """
    context, share = replica_context(), batch_weight.current()
    if context is None or share is None:
        return tf.ones([], dtype)
    own = tf.reduce_sum(tf.cast(weights, tf.float64))
    everybodys = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
    correction = tf.math.divide_no_nan(own, everybodys * share)
    return tf.cast(tf.stop_gradient(correction), dtype)


def _scale_loss(original: Callable, value: Any) -> Any:
    """Leaves a loss the mean over the replica's rows: its gradients are weighted."""
    return original(value) if batch_weight.current() is None else value


def _unscale_loss(original: Callable, value: Any) -> Any:
    step_events.loss_is_ready(value)
    return original(value) if batch_weight.current() is None else value


def _average_loss(
    original: Callable,
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """`tf.nn.compute_average_loss`, which divides by the rows of all replicas."""
    weight = batch_weight.current()
    if weight is None:
        return original(per_example_loss, sample_weight, global_batch_size)
    if global_batch_size is None:
        per_example_loss = tf.convert_to_tensor(per_example_loss)
        global_batch_size = tf.shape(per_example_loss)[0]
        return original(per_example_loss, sample_weight, global_batch_size)
    return _as_mean(original(per_example_loss, sample_weight, global_batch_size))


def _scale_regularization(original: Callable, regularization_loss: Any) -> Any:
    """`tf.nn.scale_regularization_loss`, which divides by the number of replicas."""
    if batch_weight.current() is None:
        return original(regularization_loss)
    return tf.reduce_sum(regularization_loss)


def _update_by_rows(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Lets a number that speaks of a whole batch count once, not on each replica."""
    weight = batch_weight.current()
    if weight is None or values is None or keras.ops.ndim(values) > 0:
        return original(metric, values, sample_weight)
    dtype = metric.dtype
    values = tf.cast(terms.as_row_mean(tf.convert_to_tensor(values)), dtype)
    if sample_weight is None:
        sample_weight = tf.cast(weight, dtype)
    # The mean of no rows is 0 / 0.
    values = tf.where(weight > 0, values, tf.zeros_like(values))
    return original(metric, values, sample_weight)


def _draw_seed(original: Callable, seed: Any) -> Any:
    """Gives each replica random numbers of its own, the first those of one device."""
    drawn = original(seed)
    context = replica_context()
    if context is None:
        return drawn
    rank = context.replica_id_in_sync_group
    return drawn + tf.cast(tf.stack([rank * _SEED_STRIDE, 0]), drawn.dtype)


def synchronized_moments(context: Any, x: Any, axes: Any, keepdims: bool) -> Any:
    """Mean and variance over the global batch, by one all-reduce.

    Keras reduces sum, sum of squares and count one after the other.

    Args:
        context: The replica context.
        x: Tensor, the local share of the batch.
        axes: Sequence of ints, the axes to reduce.
        keepdims: Bool, whether reduced axes stay with length one.

    Returns:
        Tuple of two tensors.

    Source: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, over the
    global batch.
    """
    total = tf.reduce_sum(x, axis=axes, keepdims=True)
    squares = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
    count = tf.reduce_sum(tf.ones_like(x), axis=axes, keepdims=True)
    total, squares, count = context.all_reduce(
        tf.distribute.ReduceOp.SUM, [total, squares, count]
    )
    mean = tf.math.divide_no_nan(total, count)
    mean_of_squares = tf.math.divide_no_nan(squares, count)
    variance = tf.maximum(mean_of_squares - tf.square(mean), 0.0)
    if keepdims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)


def synchronized_masked_moments(context: Any, x: Any, mask: Any, axes: Any) -> Any:
    """Mean and variance over the samples of the global batch that a mask keeps.

    In two passes, as Keras does: the mean first, then the squares around it.

    Args:
        context: The replica context.
        x: Tensor, the local share of the batch.
        mask: Bool tensor without the last axis of `x`, true for what counts.
        axes: Sequence of ints, the axes to reduce.

    Returns:
        Tuple of two tensors.
    """
    reduce_op = tf.distribute.ReduceOp.SUM
    kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(x))
    zeros = tf.zeros_like(x)
    total = tf.reduce_sum(tf.where(kept, x, zeros), axis=axes, keepdims=True)
    count = tf.reduce_sum(tf.cast(kept, x.dtype), axis=axes, keepdims=True)
    total, count = context.all_reduce(reduce_op, [total, count])
    # Keras's own guard against a mask that keeps nothing.
    count += keras.config.epsilon()
    mean = total / count
    around_mean = tf.square(tf.where(kept, x - mean, zeros))
    squares = tf.reduce_sum(around_mean, axis=axes, keepdims=True)
    variance = context.all_reduce(reduce_op, squares) / count
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
