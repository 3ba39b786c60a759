"""What a model and its strategy say about how they communicate."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdp.base.ownership import strategy_of
from tfdp.monitor.advice import Facts


def facts_of(model: Any) -> Facts:
    """What advice depends on.

    Args:
        model: A Keras model that has been trained.
    """
    strategy = strategy_of(model)
    optimizer = model.optimizer
    steps = getattr(optimizer, "accumulation_steps", 1)
    if strategy is None:
        return Facts(1, 1, 0, 0, compression=False, accumulates=steps > 1)
    try:
        plan = strategy.communication_plan(model)
        num_buckets, num_bytes = len(plan.buckets), plan.num_bytes
    except ValueError:  # a model that was only run eagerly, of no known inputs
        num_buckets = num_bytes = 0
    return Facts(
        num_replicas=strategy.num_replicas_in_sync,
        num_nodes=strategy.extended.algorithm_selector.topology.num_nodes,
        num_buckets=num_buckets,
        gradient_bytes=num_bytes,
        compression=strategy.extended.options.compression is not None,
        accumulates=steps > 1,
    )


def settings_of(model: Any, every: int) -> dict[str, Any]:
    """What a run was, for its JSON file.

    Args:
        model: A Keras model.
        every: Int, steps of a window.
    """
    strategy = strategy_of(model)
    return {
        "every": every,
        "model": model.name,
        "strategy": type(model.distribute_strategy).__name__,
        "backend": strategy.extended.group.backend if strategy else "none",
        "hosts": list(strategy.extended.hosts) if strategy else ["localhost"],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def loss_scale_of(optimizer: Any) -> tuple[float, int]:
    """The loss scale in force, and how many steps were skipped so far.

    Args:
        optimizer: A Keras optimizer, or `None`.

    Returns:
        Tuple of a float, NaN without a loss scale, and an int.
    """
    scale = getattr(optimizer, "loss_scale", None)
    if scale is None:
        dynamic = getattr(optimizer, "dynamic_scale", None)
        scale = math.nan if dynamic is None else float(dynamic.numpy())
    return float(scale), int(getattr(optimizer, "skipped_steps", 0) or 0)
