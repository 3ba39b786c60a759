"""Checks of models, metrics, optimizers created outside of `strategy.scope()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.join import num_joined_workers
from tfdp.ground import user_code
from tfdp.ground._compat import keras_model, keras_optimizer
from tfdp.ground.base.context import in_tfdp_scope


def check_outside_scope(model: Any, name: str) -> None:
    """Raise if a model created outside the scope is used inside it.

    Args:
        model: Keras model without a tfdp strategy.
        name: String, name of the called method, for the message.

    Raises:
        ValueError: If the scope of a tfdp strategy is active.
    """
    if in_tfdp_scope():
        raise ValueError(
            f"The model {model.name!r} was created outside `strategy.scope()`, so that "
            "its variables are on one device. Create and compile it inside the scope. "
            f"Received: a call of `{name}` inside the scope"
        )


def warn_of_separate_training(model: Any, name: str) -> None:
    """Warn once for a model if each worker of a cluster trains it separately.

    Args:
        model: Keras model.
        name: String, name of the called method, for the message.
    """
    num_workers = num_joined_workers()
    if num_workers == 1 or keras_model.strategy_of(model) is not None:
        return
    user_code.warn(
        f"The model {model.name!r} was created outside `strategy.scope()`: each of the "
        f"{num_workers} workers trains a separate model, without the updates of the "
        f"others. Create and compile it inside the scope. Received: a call of `{name}` "
        "outside the scope",
        once_for=model,
        topic="separate training",
    )


def move_metrics_into_scope(arguments: dict[str, Any]) -> None:
    """Move metrics that were created outside the active scope into it, in place.

    Args:
        arguments: Dict, the arguments of `compile` by name.
    """
    for key in ("metrics", "weighted_metrics"):
        for metric in keras.tree.flatten(arguments.get(key)):
            if isinstance(metric, keras.Metric):
                for variable in metric.variables:
                    keras_optimizer.recreate_in_scope(variable)


def weights_outside(model: Any) -> list:
    """Return the trainable weights of a model that were created outside the scope."""
    return list(filter(keras_optimizer.is_on_one_device, model.trainable_variables))


def bring_weights_into_scope(model: Any) -> None:
    """Create weights that are on one device again in the scope of the model's strategy.

    Layers create their weights in their first call, which may be outside the scope of
    the model. The weights keep their values; workers get those of the first worker. The
    model's functions of steps are dropped, and the user is warned.

    Args:
        model: Keras model of a tfdp strategy, before it trains or is evaluated. All
            workers have agreed on the number of `weights_outside`, since they leave the
            scope together.
    """
    if not weights_outside(model):
        return
    user_code.warn(
        f"The layers of the model {model.name!r} have created weights outside "
        "`strategy.scope()`, in their first call. The weights move into the scope now; "
        "a `tf.function` that has called the model reads the old ones. Make the first "
        "call inside the scope."
    )
    with model.distribute_strategy.scope():
        for variable in filter(keras_optimizer.is_on_one_device, model.variables):
            keras_optimizer.recreate_in_scope(variable)
    model.train_function = model.test_function = model.predict_function = None


def bring_optimizer_into_scope(optimizer: Any) -> None:
    """Move an optimizer that was created outside the active scope into it, in place.

    It then belongs to the active strategy, and its counter and learning rate are
    created again in the scope. Its inner optimizers are moved with it. Outside of a
    scope nothing is moved. A `LossScaleOptimizer` from the scope stays there, but its
    inner optimizer is moved if it is from outside.

    Args:
        optimizer: Keras optimizer, or `None`.

    Raises:
        ValueError: If it has been built outside, or if a step is running.
    """
    active = tf.distribute.get_strategy()
    if optimizer is None or not tf.distribute.has_strategy():
        return
    if keras_optimizer.strategy_of_optimizer(optimizer) is active:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            # For float16 `compile` creates a `LossScaleOptimizer` in the scope, around
            # the user's optimizer, which may have been created outside the scope.
            bring_optimizer_into_scope(optimizer.inner_optimizer)
        return
    if optimizer.built or not tf.distribute.in_cross_replica_context():
        raise ValueError(
            f"The optimizer {optimizer.name!r} was created outside `strategy.scope()`. "
            "Create a new one, inside the scope."
        )
    keras_optimizer.move_optimizer_into_scope(optimizer, active)


def check_variables_in_scope(variables: Sequence[Any]) -> None:
    """Raise if an optimizer is built inside a scope for variables from outside of it.

    Raises:
        ValueError: The message names the first variable from outside.
    """
    for variable in variables:
        if keras_optimizer.is_on_one_device(variable):
            name = getattr(variable, "path", None) or variable.name
            raise ValueError(
                f"The variable {name!r} was created outside `strategy.scope()`, so "
                "that it is on one device. Create the model and its optimizer inside "
                "the scope."
            )
