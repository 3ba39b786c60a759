"""One worker that trains by Keras `fit`, with rows by speed or without."""

from __future__ import annotations

import time
from typing import Any

from tfdp.launch.bench.channel import Arms, work
from tfdp.launch.bench.training import make_strategy


def slow_layer(seconds: float) -> Any:
    """A layer that takes so long for each row, without loading the machine."""
    import keras
    import numpy as np
    import tensorflow as tf

    class SlowByRows(keras.layers.Layer):
        """Layer that sleeps in proportion to its rows."""

        def call(self, x: Any) -> Any:
            def sleep(rows: Any) -> Any:
                time.sleep(seconds * int(rows))
                return np.int32(0)

            slept = tf.numpy_function(sleep, [tf.shape(x)[0]], tf.int32)
            with tf.control_dependencies([slept]):
                return tf.identity(x)

    return SlowByRows()


def make_arms(setup: dict[str, Any]) -> Arms:
    strategy = make_strategy(setup)

    from tfdp.training.data.load_balancer import LoadBalancer
    from tools.bench.fit_blocks import block_of

    extended = strategy.extended
    is_slow = setup["rank"] == 1 and setup["delay_ms"]
    first = slow_layer(setup["delay_ms"] / 1000) if is_slow else None
    block = block_of(strategy, setup["model"], first=first)
    balance = LoadBalancer(len(setup["addresses"]), extended.num_local)

    def with_balance(chosen: LoadBalancer | None, steps: int) -> dict[str, float]:
        # What the launcher's option has the strategy make; it keeps what it learns.
        extended.balance = chosen
        return {**block(steps), "rows": balance.rows(64)[1]}

    return {
        "off": lambda steps: with_balance(None, steps),
        "on": lambda steps: with_balance(balance, steps),
    }


if __name__ == "__main__":
    work(make_arms)
