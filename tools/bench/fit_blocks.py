"""One worker that trains by Keras `fit`, in blocks with something and without."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdp.launch.bench.channel import Variants, work
from tfdp.launch.bench.fit import build, make_batch, timed_fit
from tfdp.launch.bench.training import make_strategy
from tools.bench.models import MODELS

# Steps that are not timed: one is traced, the next ones find cold caches.
SKIPPED = 5


def block_of(
    strategy: Any, name: str, skipped: int = SKIPPED, first: Any = None
) -> Callable[..., dict[str, float]]:
    """Make a model, and a function that fits it for a block.

    Args:
        strategy: A `tf.distribute` strategy.
        name: String, the model, see `tools.bench.models`.
        skipped: Int, steps at the begin that are not timed. Defaults to `SKIPPED`.
        first: Keras layer in front of it, or `None`. Defaults to `None`.

    Returns:
        Callable that takes the number of steps and callbacks, and returns
        `{"seconds": ...}` of a step.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build(MODELS[name])
        if first is not None:
            inputs = keras.Input(model.input_shape[1:])
            model = keras.Model(inputs, model(first(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss=loss)
    batch = make_batch(MODELS[name], 32 * strategy.num_replicas_in_sync)
    fit = timed_fit(model, batch, skipped)

    def block(steps: int, *callbacks: Any) -> dict[str, float]:
        # Both variants trace their step anew.
        model.train_function = None
        return {"seconds": fit(steps - skipped - 1, *callbacks)}

    return block


def monitor_variants(strategy: Any, setup: dict[str, Any]) -> Variants:
    """With the communication monitor or without."""
    from tfdp.callbacks import CommunicationMonitor

    block = block_of(strategy, setup["model"])
    folder = tempfile.TemporaryDirectory(prefix="tfdp-monitor-")

    def on(steps: int) -> dict[str, float]:
        monitor = CommunicationMonitor(folder.name, every=10)
        result = block(steps, monitor)
        last = monitor.recent(steps - SKIPPED)
        parts = (last.compute_seconds + last.exposed_seconds) / last.step_seconds
        return {**result, "parts": parts}

    return {"off": block, "on": on}


def consistency_variants(strategy: Any, setup: dict[str, Any]) -> Variants:
    """Looked after or not."""
    from tfdp.callbacks import ConsistencyCheck

    every = setup["every"]
    # The first check, which TensorFlow has to get ready for, is not timed.
    block = block_of(strategy, setup["model"], skipped=every + 5)

    def off(steps: int) -> dict[str, float]:
        with _unwatched():
            return block(steps + every + 6)

    def on(steps: int) -> dict[str, float]:
        return block(steps + every + 6, ConsistencyCheck(every=every))

    return {"off": off, "on": on}


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Run without heartbeats and without the watchdog."""
    from tfdp.communication.coordination.watch.heartbeat import Heartbeat
    from tfdp.communication.coordination.watch.watchdog import Watchdog

    def nothing(thread: object) -> None:
        del thread

    with (
        mock.patch.object(Heartbeat, "_beat", nothing),
        mock.patch.object(Watchdog, "_check_workers", nothing),
    ):
        yield


def flight_variants(strategy: Any, setup: dict[str, Any]) -> Variants:
    """With flight records or without, and with the time that the entries take."""
    block = block_of(strategy, setup["model"])

    def variant(times: int) -> Callable[[int], dict[str, float]]:
        def run(steps: int) -> dict[str, float]:
            with _recorded(times) as spent:
                result = block(steps)
            return {**result, "entries": sum(spent) / max(times, 1) / steps}

        return run

    def on(steps: int) -> dict[str, float]:
        return {**block(steps), "entries": 0.0}

    return {"off": variant(0), "on": on, "timed": variant(setup["times"])}


@contextlib.contextmanager
def _recorded(times: int) -> Iterator[list[float]]:
    """Make each entry so many times, and yield the processor time that this takes."""
    from tfdp.communication.coordination.flight_record import CollectiveRing
    from tfdp.communication.coordination.progress import ProgressRecorder

    spent: list[float] = []

    def repeated(function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            result, begin = None, time.thread_time()
            for _ in range(times):
                result = function(*arguments)
            spent.append(time.thread_time() - begin)
            return result

        return call

    def enter_and_leave(*arguments: Any) -> contextlib.AbstractContextManager[None]:
        with original(*arguments):
            pass
        return contextlib.nullcontext()

    original = CollectiveRing.entered
    place = repeated(ProgressRecorder.record_place)
    with (
        mock.patch.object(CollectiveRing, "entered", repeated(enter_and_leave)),
        mock.patch.object(ProgressRecorder, "record_place", place),
    ):
        yield spent


def rebalance_variants(strategy: Any, setup: dict[str, Any]) -> Variants:
    """With rows by speed or without."""
    from tfdp.training.data.load_balancer import LoadBalancer

    extended = strategy.extended
    is_slow = setup["rank"] == 1 and setup["delay_ms"]
    first = SlowByRows(setup["delay_ms"] / 1000) if is_slow else None
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


class SlowByRows(keras.layers.Layer):
    """A layer that takes so long for each row, without loading the machine.

    Args:
        seconds: Float.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, x: Any) -> Any:
        def sleep(rows: Any) -> Any:
            time.sleep(self._seconds * int(rows))
            return np.int32(0)

        slept = tf.numpy_function(sleep, [tf.shape(x)[0]], tf.int32)
        with tf.control_dependencies([slept]):
            return tf.identity(x)


_VARIANTS = {
    "monitor": monitor_variants,
    "consistency": consistency_variants,
    "flight": flight_variants,
    "rebalance": rebalance_variants,
}


def make_variants(setup: dict[str, Any]) -> Variants:
    strategy = make_strategy(setup)
    return _VARIANTS[setup["benchmark"]](strategy, setup)


if __name__ == "__main__":
    work(make_variants)
