"""Keras's optimizers under several replicas: clip and check the sum.

Keras clips each replica's gradient, and checks it for overflow, before it adds
them up; one device clips and checks the sum. Each function without an underscore
takes the place of one of Keras, see `tfdp.keras_hooks.install`. It is called with the
original first, and hands over to it where no tfdp strategy is in force.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.base import batch_weight
from tfdp.base.ownership import in_own_step, replica_context
from tfdp.base.param_groups import clips, innermost, is_linear
from tfdp.reduction.fusion import weighted
from tfdp.reduction.reducer import gradients_of

# What one replica's update knows: each replica is traced in its own thread.
_thread = threading.local()


def apply_gradients(
    original: Callable, optimizer: Any, grads: Any, variables: Any
) -> Any:
    """Weigh gradients by the rows of a replica, here or in the reducer."""
    _thread.variables = variables
    weight = None if in_own_step() else batch_weight.weight_for(optimizer)
    sums_up = optimizer.gradient_accumulation_steps or tf.executing_eagerly()
    if weight is not None and sums_up:
        # Before anything is added up: each micro-batch has its own weights.
        grads = [weighted(gradient, weight) for gradient in grads]
        weight = None
    # Else the reducer multiplies whole buckets by it: they are filled in the order in
    # which the backward pass makes the gradients.
    _thread.weight = weight
    return original(optimizer, grads, variables)


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Weigh a loss by the rows of a replica before it is scaled."""
    inner = innermost(optimizer.inner_optimizer)
    return original(
        optimizer, batch_weight.weigh_loss(tf.convert_to_tensor(loss), inner)
    )


def clip_gradients(original: Callable, optimizer: Any, grads: Any) -> Any:
    """Clip the sum of all replicas' gradients."""
    context = replica_context()
    if not clips(optimizer) or context is None or in_own_step():
        return original(optimizer, grads)
    given = [index for index, gradient in enumerate(grads) if gradient is not None]
    reduced = list(grads)
    with _described(optimizer, [_thread.variables[index] for index in given]):
        sums = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [grads[index] for index in given]
        )
    for index, gradient in zip(given, sums, strict=True):
        reduced[index] = gradient
    _thread.is_reduced = True
    return original(optimizer, reduced)


def update_step(
    original: Callable, optimizer: Any, grads: Any, variables: Any, *rest: Any
) -> Any:
    """Tell the all-reduce which variables its gradients belong to."""
    if replica_context() is None or in_own_step():
        return original(optimizer, grads, variables, *rest)
    pairs = zip(grads, variables, strict=True)
    with _described(optimizer, [v for g, v in pairs if g is not None]):
        return original(optimizer, grads, variables, *rest)


def all_reduce_sum(original: Callable, optimizer: Any, grads_and_vars: Any) -> Any:
    """Add up gradients that were not added up before they were clipped."""
    if in_own_step():
        return list(grads_and_vars)
    if getattr(_thread, "is_reduced", False):
        _thread.is_reduced = False
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def check_finite(original: Callable, optimizer: Any, grads: Any) -> Any:
    """Agree on whether the gradients of all replicas are finite."""
    finite = original(optimizer, grads)
    context, weight = replica_context(), batch_weight.current()
    if context is None:
        return finite
    if weight is not None:
        # A replica without rows has means of 0 / 0, and adds nothing.
        finite = tf.logical_or(finite, tf.equal(weight, 0))
    # Replicas that disagree would take different branches, of which only one
    # has collectives.
    overflows = context.all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.int32)
    )
    return tf.equal(overflows, 0)


def _described(optimizer: Any, variables: list[Any]) -> Any:
    return gradients_of(
        variables,
        is_linear=is_linear(optimizer),
        weight=getattr(_thread, "weight", None),
    )
