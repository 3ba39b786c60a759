"""Places where Keras counts replicas wrongly, put right under a tfdp strategy.

Each function takes the place of one of Keras, is called with the original
first, and hands over to it where no tfdp strategy is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat, shares
from tfdp.reducer import gradients_of

# An odd number far from the increments of the counter beside it.
_SEED_STRIDE = 1_000_003
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")
_thread = threading.local()


def install(is_ours: Callable[[Any], bool]) -> None:
    """Puts the functions in place, once for a process.

    Args:
        is_ours: Callable, whether a strategy is one of tfdp's.
    """

    def current() -> Any:
        strategy = tf.distribute.get_strategy()
        return strategy if is_ours(strategy) else None

    def moments(original: Callable, x: Any, axes: Any, keepdims: bool) -> Any:
        context = tf.distribute.get_replica_context()
        if current() is None or context is None:
            return original(x, axes, keepdims)
        return synchronized_moments(context, x, axes, keepdims)

    def reduce_values(original: Callable, values: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(values, *args, **kwargs)
        reduction = args[1] if len(args) > 1 else kwargs.get(
            "reduction", "sum_over_batch_size"
        )
        is_mean = reduction not in (None, "none", "sum")
        if current() is None or not is_mean or tuple(values.shape) != ():
            return result
        # A loss function that takes the mean itself: Keras returns such a
        # value before it divides by the number of replicas.
        return _compat.keras_loss.scale_loss_for_distribution(result)

    def scale_loss(original: Callable, value: Any) -> Any:
        weight = shares.current()
        if weight is None or current() is None:
            return original(value)
        return value * tf.cast(weight, value.dtype)

    def unscale_loss(original: Callable, value: Any) -> Any:
        weight = shares.current()
        if weight is None or current() is None:
            return original(value)
        return tf.math.divide_no_nan(value, tf.cast(weight, value.dtype))

    def draw_seed(original: Callable, seed: Any) -> Any:
        drawn = original(seed)
        context = tf.distribute.get_replica_context()
        if current() is None or context is None:
            return drawn
        rank = context.replica_id_in_sync_group
        offset = tf.cast(tf.stack([rank * _SEED_STRIDE, 0]), drawn.dtype)
        return drawn + offset

    def in_replica_of_ours() -> bool:
        return current() is not None and not tf.distribute.in_cross_replica_context()

    def apply_gradients(
        original: Callable, optimizer: Any, grads: Any, variables: Any
    ) -> Any:
        _thread.trained = variables
        return original(optimizer, grads, variables)

    def clip_gradients(original: Callable, optimizer: Any, grads: Any) -> Any:
        clips = any(getattr(optimizer, name, None) for name in _CLIPPING)
        if not clips or not in_replica_of_ours():
            return original(optimizer, grads)
        # Keras clips each replica's gradient and then adds them. One device
        # clips the sum.
        reduced = _reduced(optimizer, grads, _thread.trained)
        _thread.is_reduced = True
        return original(optimizer, reduced)

    def update_step(
        original: Callable, optimizer: Any, grads: Any, variables: Any, *rest: Any
    ) -> Any:
        if not in_replica_of_ours():
            return original(optimizer, grads, variables, *rest)
        pairs = zip(grads, variables, strict=True)
        with _described(optimizer, [v for g, v in pairs if g is not None]):
            return original(optimizer, grads, variables, *rest)

    def all_reduce_sum(original: Callable, optimizer: Any, grads_and_vars: Any) -> Any:
        if getattr(_thread, "is_reduced", False):
            _thread.is_reduced = False
            return list(grads_and_vars)
        return original(optimizer, grads_and_vars)

    def check_finite(original: Callable, optimizer: Any, grads: Any) -> Any:
        finite = original(optimizer, grads)
        if not in_replica_of_ours():
            return finite
        # Replicas that disagree would take different branches, of which only
        # one has collectives.
        context = tf.distribute.get_replica_context()
        overflows = context.all_reduce(
            tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.int32)
        )
        return tf.equal(overflows, 0)

    _compat.replace(_compat.keras_nn, "_compute_moments_sync", moments)
    _compat.replace(_compat.keras_loss, "reduce_values", reduce_values)
    _compat.replace(_compat.keras_loss, "scale_loss_for_distribution", scale_loss)
    _compat.replace(_compat.keras_loss, "unscale_loss_for_distribution", unscale_loss)
    for module in _compat.KERAS_RANDOM_MODULES:
        _compat.replace(module, "draw_seed", draw_seed)
    _compat.replace(_compat.BaseOptimizer, "_backend_apply_gradients", apply_gradients)
    _compat.replace(_compat.BaseOptimizer, "_clip_gradients", clip_gradients)
    _compat.replace(_compat.TFOptimizer, "_backend_update_step", update_step)
    _compat.replace(_compat.TFOptimizer, "_all_reduce_sum_gradients", all_reduce_sum)
    _compat.replace(keras.optimizers.LossScaleOptimizer, "check_finite", check_finite)


def _described(optimizer: Any, variables: list[Any]) -> Any:
    is_linear = type(optimizer) is keras.optimizers.SGD
    return gradients_of(variables, is_linear=is_linear)


def _reduced(optimizer: Any, grads: Any, variables: Any) -> list:
    """The gradients of one replica, added to those of the others."""
    context = tf.distribute.get_replica_context()
    given = [(i, g) for i, g in enumerate(grads) if g is not None]
    results = list(grads)
    with _described(optimizer, [variables[i] for i, _ in given]):
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [g for _, g in given])
    for (index, _), gradient in zip(given, reduced, strict=True):
        results[index] = gradient
    return results


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
