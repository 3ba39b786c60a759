"""Updates by plain Keras optimizers under several replicas, as steps of tfdp.

Keras clips each replica's gradient, and checks it for overflow, before it sums the
gradients; one device clips and checks the sum. Each function replaces a Keras function;
the table is in `tfdp.training.keras_hooks.install`. It receives that function as
`original`, before the function's own arguments, and only calls it if no tfdp strategy
is active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import keras_model, keras_optimizer
from tfdp.ground.base import program_trace, step_context
from tfdp.ground.base.context import (
    in_tfdp_scope,
    is_tfdp,
    outside_tfdp_scope,
    replica_context,
)
from tfdp.ground.base.deferred_updates import defer
from tfdp.ground.base.wrappers import wrapper_of
from tfdp.training.keras_hooks.scope_checks import (
    bring_optimizer_into_scope,
    check_variables_in_scope,
)
from tfdp.training.reduction.gradient_reducer import replica_reducer
from tfdp.training.replicas.synchronized_scope import build_in_step
from tfdp.training.step.empty_step import record_update
from tfdp.training.step.path import take_step
from tfdp.training.step.step import keras_step, match_gradients


# AutoGraph does not convert functions of Keras, so it must not convert their
# replacements either.
@tf.autograph.experimental.do_not_convert
def apply(
    original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Reduce the gradients of a plain Keras optimizer over replicas, and apply them.

    While a step is traced as on one device, or compiled by XLA, the update is only
    recorded, and each replica calls this function again later. Outside of replicas,
    Keras's method `original` updates. A step that only builds the model updates
    nothing.

    Args:
        original: Callable, `apply` of Keras's base optimizer.
        optimizer: Keras optimizer.
        grads: Sequence of gradients, on a replica those of its rows.
        trainable_variables: Sequence of Keras variables, or `None` for those that the
            optimizer was built for. Defaults to `None`.
    """
    if keras_model.is_built_symbolically():
        return None
    wrapper = wrapper_of(optimizer)
    if wrapper is not None and keras_optimizer.overrides_apply(optimizer):
        return wrapper.apply_directly(grads, trainable_variables)
    if replica_context() is None:
        _prepare_outside_of_run(optimizer, trainable_variables)
        with outside_tfdp_scope():
            return original(optimizer, grads, trainable_variables)
    update = functools.partial(apply, original, optimizer)
    if defer(optimizer, grads, trainable_variables, update):
        return None
    if len(grads) == 0:
        return None
    bring_optimizer_into_scope(optimizer)
    gradients, variables = match_gradients(optimizer, grads, trainable_variables)
    with keras.name_scope(optimizer.name, caller=optimizer):
        gradients, variables = keras_optimizer.overwrite_by_gradients(
            optimizer, gradients, variables
        )
        trained = list(variables)
        record_update(
            optimizer, lambda: keras_step(optimizer, trained, replica_reducer())
        )
        step = keras_step(optimizer, trained, replica_reducer())
        take_step(step, list(gradients))
    return None


def build(original: Callable, optimizer: Any, variables: Any) -> None:
    """Build an optimizer by `original`; in a tfdp scope, move it there first.

    Raises:
        ValueError: If the optimizer was built outside of the scope, or if one of
            `variables` was created outside.
    """
    if in_tfdp_scope():
        bring_optimizer_into_scope(optimizer)
        check_variables_in_scope(variables)
    original(optimizer, variables)


def apply_or_defer(
    original: Callable, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Update by a `LossScaleOptimizer`, which is moved into the scope and built first.

    In a step traced as on one device, or compiled, the update is only recorded.

    Args:
        original: Callable, `LossScaleOptimizer.apply`, called last unless deferred.
        optimizer: The `LossScaleOptimizer`. In a replica, and with
            `trainable_variables`, it is moved into the active strategy's scope, and
            built if it is not.
        grads: Sequence of gradients.
        trainable_variables: Sequence of Keras variables, or `None`. Defaults to `None`.
    """
    if keras_model.is_built_symbolically():
        return
    update = functools.partial(apply_or_defer, original, optimizer)
    if defer(optimizer, grads, trainable_variables, update):
        return
    if replica_context() is not None and trainable_variables is not None:
        bring_optimizer_into_scope(optimizer)
        if not optimizer.built:
            build_in_step(optimizer, trainable_variables)
    elif replica_context() is None:
        _prepare_outside_of_run(optimizer, trainable_variables)
    with outside_tfdp_scope():
        original(optimizer, grads, trainable_variables)


def _prepare_outside_of_run(optimizer: Any, variables: Sequence[Any] | None) -> None:
    """Build an optimizer for an update of mirrored variables outside `strategy.run`.

    Such a step computes the whole batch on one device, and its update assigns the
    copies of all replicas of this process.

    Args:
        optimizer: Keras optimizer, moved into the scope of the variables' strategy.
        variables: Sequence of the variables to update, or `None` for those that the
            optimizer was built for.

    Raises:
        ValueError: If each of several workers would update its own copies, or if the
            optimizer was built outside of the scope, or in the scope for variables
            from outside of it.
    """
    is_in_scope = in_tfdp_scope()
    is_in_other_scope = tf.distribute.has_strategy() and not is_in_scope
    if step_context.current().in_run or is_in_other_scope:
        return
    variables = variables or keras_optimizer.trained_by(optimizer)
    if is_in_scope and not optimizer.built:
        check_variables_in_scope(variables)
    strategies = map(keras_optimizer.strategy_of_variable, variables)
    strategy: Any = next(filter(is_tfdp, strategies), None)
    if strategy is None:
        return
    if strategy.extended.worker_group.num_workers > 1:
        raise ValueError(
            f"The optimizer {optimizer.name!r} was applied outside of `strategy.run`, "
            "where each worker would train a separate model. Put the step into a "
            "function, and call it by `strategy.run(step, args=(x, y))`."
        )
    is_of_strategy = keras_optimizer.strategy_of_optimizer(optimizer) is strategy
    if not (is_of_strategy and optimizer.built):
        with tf.init_scope(), strategy.scope():
            bring_optimizer_into_scope(optimizer)
            optimizer.build(list(variables))


def check_finite(original: Callable, optimizer: Any, grads: Any) -> Any:
    """Return whether the gradients of all replicas are finite, a scalar bool tensor.

    `original`, the method of `LossScaleOptimizer`, checks those of this replica.
    """
    finite = original(optimizer, grads)
    if program_trace.current() is not None:
        return finite
    context = replica_context()
    if context is None:
        return finite
    # All replicas need the same answer. Otherwise only some would take the branch with
    # the update, and its collectives would wait for the others indefinitely.
    overflows = context.all_reduce(
        tf.distribute.ReduceOp.SUM, tf.cast(tf.logical_not(finite), tf.int32)
    )
    return tf.equal(overflows, 0)
