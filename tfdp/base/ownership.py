"""Which strategies, models and contexts are tfdp's to look after."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is one of tfdp's."""
    return hasattr(getattr(strategy, "extended", None), "reducer")


def strategy_of(model: Any) -> Any:
    """The tfdp strategy of a Keras model, or `None`."""
    strategy = _compat.strategy_of(model)
    return strategy if is_ours(strategy) else None


def num_replicas_of(optimizer: Any) -> int:
    """On how many replicas an optimizer is updated: 1 without a strategy of tfdp's."""
    strategy = _compat.strategy_of_optimizer(optimizer)
    return strategy.num_replicas_in_sync if is_ours(strategy) else 1


def in_force() -> bool:
    """Whether a tfdp strategy's scope is in force."""
    return tf.distribute.has_strategy() and is_ours(tf.distribute.get_strategy())


def replica_context() -> Any:
    """The context of the replica of a tfdp strategy that is running, or `None`."""
    return tf.distribute.get_replica_context() if in_force() else None


def in_replica_thread() -> bool:
    """Whether this thread runs one replica's part of any `strategy.run`."""
    context = tf.distribute.get_replica_context()
    return context is not None and tf.distribute.has_strategy()
