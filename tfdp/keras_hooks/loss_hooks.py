"""Losses and metrics under several replicas: means over the rows of all of them.

Each function without an underscore takes the place of one of Keras or TensorFlow, see
`tfdp.keras_hooks.install`. It is called with the original first, and hands over to it
where no tfdp strategy is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.base import batch_weight, program_trace
from tfdp.base.context import in_tfdp_scope
from tfdp.collectives import step_events
from tfdp.losses import loss_terms
from tfdp.losses.row_forms.form import CONSTANT, ROWS
from tfdp.losses.training_group import context_and_share, reduced

# Each replica is traced in its own thread.
_thread = threading.local()


def all_reduce(
    original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Pass gradients back so that each replica's loss counts by its rows."""
    if program_trace.current() is not None:
        return value
    flat = tf.nest.flatten(value)
    is_plain = all(isinstance(x, tf.Tensor) and x.dtype.is_floating for x in flat)
    if batch_weight.current() is None or not is_plain:
        return original(context, reduce_op, value, options)

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return original(context, reduce_op, tensors, options)

    results = reduced(flat, reduce, batch_weight.weight_of_upstream)
    for result in results:
        loss_terms.set_form(result, CONSTANT)
    return tf.nest.pack_sequence_as(value, results)


def reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    """Reduce the losses of rows to what the weighted sum of replicas needs."""
    result = original(values, sample_weight, reduction)
    if program_trace.current() is not None:
        return result
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        result = result * _global_mean_correction(sample_weight, result.dtype)
    is_mean = reduction not in (None, "none", "sum")
    is_scalar = tuple(values.shape) == ()
    if reduction == "sum" and not is_scalar and _is_compiled():
        return _as_mean(result)
    if in_tfdp_scope() and is_mean and is_scalar:
        # A loss function that takes the mean itself: Keras returns such a value
        # before it divides by the number of replicas.
        return _compat.keras_loss.scale_loss_for_distribution(result)
    if is_mean and not is_scalar:
        loss_terms.set_mean(result, values)
    return result


def compiled_loss(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Mark the losses of `compile`: nothing else is computed of them than their sum."""
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
    loss_terms.set_mean(mean)
    return mean


def apply_mask(
    original: Callable, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    """Scale a mask so that its mean is one over everybody's."""
    weights = original(sample_weight, mask, dtype, reduction)
    if program_trace.current() is not None:
        return weights
    if mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    weights = weights * _global_mean_correction(mask, dtype)
    loss_terms.set_form(weights, ROWS)
    return weights


def _global_mean_correction(weights: Any, dtype: Any) -> Any:
    """Factor from a mean over a replica's weights to one over everybody's.

    Keras divides by the replica's own sum of weights, or of a mask, and then
    the replica counts by its share of the samples. The mean over the global
    batch divides by the sum of all replicas' weights.
    """
    context, share = context_and_share()
    if context is None or share is None:
        return tf.ones([], dtype)
    own = tf.reduce_sum(tf.cast(weights, tf.float64))
    everybodys = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
    correction = tf.math.divide_no_nan(own, everybodys * share)
    return tf.cast(tf.stop_gradient(correction), dtype)


def scale_loss(original: Callable, value: Any) -> Any:
    """Leave a loss the mean over the replica's rows: its gradients are weighted."""
    if program_trace.current() is not None:
        return value
    return original(value) if batch_weight.current() is None else value


def unscale_loss(original: Callable, value: Any) -> Any:
    """Leave a loss that was not scaled, and note that it is computed."""
    if (trace := program_trace.current()) is not None:
        trace.add([value], lambda given: step_events.record_loss(given[0]), "as held")
        return value
    step_events.record_loss(value)
    return original(value) if batch_weight.current() is None else value


def average_loss(
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


def scale_regularization(original: Callable, regularization_loss: Any) -> Any:
    """`tf.nn.scale_regularization_loss`, which divides by the number of replicas."""
    if batch_weight.current() is None:
        return original(regularization_loss)
    return tf.reduce_sum(regularization_loss)


def update_by_rows(
    original: Callable, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Count a number that speaks of a whole batch once, not on each replica."""
    weight = batch_weight.current()
    if weight is None or values is None or keras.ops.ndim(values) > 0:
        return original(metric, values, sample_weight)
    dtype = metric.dtype
    values = tf.cast(loss_terms.scale_to_row_mean(tf.convert_to_tensor(values)), dtype)
    if sample_weight is None:
        sample_weight = tf.cast(weight, dtype)
    # The mean of no rows is 0 / 0.
    values = tf.where(weight > 0, values, tf.zeros_like(values))
    return original(metric, values, sample_weight)
