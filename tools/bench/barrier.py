"""The barrier of a worker whose step is too long to run once more before a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def barrier(strategy: Any) -> Callable[[], Any]:
    """A sum of one number, for which every worker waits for all others.

    Args:
        strategy: Strategy.

    Returns:
        Callable that returns a tensor.
    """

    def replica() -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([1]))

    @tf.function
    def step() -> Any:
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step
