"""The tfdp strategy of a model, an optimizer, the current scope or replica."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import keras_model, keras_optimizer
from tfdp.ground._compat.tf_distribute import outside_strategies
from tfdp.ground.base import step_context


def is_tfdp(strategy: Any) -> bool:
    """Return whether a strategy is one of tfdp's."""
    return hasattr(getattr(strategy, "extended", None), "reducer")


def strategy_of(model: Any) -> Any:
    """Return the tfdp strategy of a Keras model, or `None`."""
    strategy = keras_model.strategy_of(model)
    return strategy if is_tfdp(strategy) else None


def num_replicas_of(optimizer: Any) -> int:
    """Return the number of replicas of an optimizer: 1 without a tfdp strategy."""
    strategy = keras_optimizer.strategy_of_optimizer(optimizer)
    return strategy.num_replicas_in_sync if is_tfdp(strategy) else 1


def in_tfdp_scope() -> bool:
    """Return whether the code runs in the scope of a tfdp strategy."""
    return tf.distribute.has_strategy() and is_tfdp(tf.distribute.get_strategy())


def replica_context() -> Any:
    """Return the context of the running replica of a tfdp strategy, or `None`."""
    return tf.distribute.get_replica_context() if in_tfdp_scope() else None


def outside_tfdp_scope() -> AbstractContextManager[None]:
    """Leave the scope of a tfdp strategy for a block outside of `strategy.run`.

    Outside of the scope the strategy's variables are read and assigned like those of
    one device. In it, TensorFlow computes no gradients of them, and Keras updates none.
    """
    is_outside = not step_context.current().in_run
    is_left = in_tfdp_scope() and is_outside and replica_context() is None
    return outside_strategies() if is_left else nullcontext()


def in_replica_thread() -> bool:
    """Return whether this thread runs one replica's part of any `strategy.run`."""
    context = tf.distribute.get_replica_context()
    return context is not None and tf.distribute.has_strategy()
