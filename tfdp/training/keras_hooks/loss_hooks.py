"""Losses under several replicas: the program of one device needs no scale of them.

Each function takes the place of one of Keras or TensorFlow, see
`tfdp.training.keras_hooks.install`. It is called with the original first, and hands
over to it where no tfdp strategy is in force.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import step_events
from tfdp.ground import _compat
from tfdp.ground.base import program_trace
from tfdp.ground.base.context import in_tfdp_scope
from tfdp.training.parameters.gathers import backward_pass, marked_backward_pass


def all_reduce(
    original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Leave a value as it is in the program of one device."""
    if program_trace.current() is not None:
        return value
    return original(context, reduce_op, value, options)


def replica_id(original: Callable, context: Any) -> Any:
    """Return that of one device in its program."""
    if program_trace.current() is not None:
        return tf.zeros([], tf.int32)
    return original(context)


def reduce_values(
    original: Callable,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    """Divide a loss that is a scalar already by the number of replicas, too."""
    result = original(values, sample_weight, reduction)
    is_mean = reduction not in (None, "none", "sum")
    is_traced = program_trace.current() is not None
    if is_traced or not in_tfdp_scope() or not is_mean or tuple(values.shape):
        return result
    # A loss function that takes the mean itself: Keras returns such a value before it
    # divides by the number of replicas.
    return _compat.keras_loss.scale_loss_for_distribution(result)


def scale_loss(original: Callable, value: Any) -> Any:
    """Leave a loss as it is in the program of one device."""
    return original(value) if program_trace.current() is None else value


def unscale_loss(original: Callable, value: Any) -> Any:
    """Leave a loss that was not scaled, and note that it is computed."""
    if (trace := program_trace.current()) is not None:
        trace.add([value], lambda given: step_events.record_loss(given[0]), "as held")
        return value
    step_events.record_loss(value)
    return original(value)


def gradient(
    original: Callable,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Mark a backward pass, in which sharded parameters are gathered again."""
    trace = program_trace.traced()
    if trace is not None:
        trace.losses += tf.nest.flatten(target)
    with backward_pass() if trace is None else marked_backward_pass(trace):
        return original(tape, target, sources, output_gradients, unconnected_gradients)
