"""Places where Keras counts replicas wrongly, put right under a tfdp strategy.

Each function takes the place of one of Keras, is called with the original
first, and hands over to it where no tfdp strategy is in force.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat
from tfdp.reducer import gradients_of

# An odd number far from the increments of the counter beside it.
_SEED_STRIDE = 1_000_003


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

    def draw_seed(original: Callable, seed: Any) -> Any:
        drawn = original(seed)
        context = tf.distribute.get_replica_context()
        if current() is None or context is None:
            return drawn
        rank = context.replica_id_in_sync_group
        offset = tf.cast(tf.stack([rank * _SEED_STRIDE, 0]), drawn.dtype)
        return drawn + offset

    def update_step(
        original: Callable, optimizer: Any, grads: Any, variables: Any, *rest: Any
    ) -> Any:
        if current() is None or tf.distribute.in_cross_replica_context():
            return original(optimizer, grads, variables, *rest)
        pairs = zip(grads, variables, strict=True)
        trained = [v for g, v in pairs if g is not None]
        is_linear = type(optimizer) is keras.optimizers.SGD
        with gradients_of(trained, is_linear=is_linear):
            return original(optimizer, grads, variables, *rest)

    _compat.replace(_compat.keras_nn, "_compute_moments_sync", moments)
    _compat.replace(_compat.keras_loss, "reduce_values", reduce_values)
    for module in _compat.KERAS_RANDOM_MODULES:
        _compat.replace(module, "draw_seed", draw_seed)
    _compat.replace(_compat.TFOptimizer, "_backend_update_step", update_step)


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
