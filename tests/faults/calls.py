"""What the workers of a job call that do not do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.faults.plan import BY_HAND, METHODS

BATCH, NUM_ROWS, NUM_STEPS = 16, 64, 20


class Caller:
    """Makes one of the calls that `faults.plan` names.

    Args:
        strategy: A strategy of tfdp.
        state: String, a folder for what is saved.
    """

    def __init__(self, strategy: Any, state: str) -> None:
        self._strategy = strategy
        self._state = state
        keras.utils.set_random_seed(1)
        self._model = self._build()
        self._by_hand: dict[str, Callable[[], None]] = {
            "steps": tf.function(lambda: self._run(self._sum)),
            "other steps": tf.function(lambda: self._run(self._sum, 3)),
            "steps that gather": tf.function(lambda: self._run(self._gather)),
            "sum": lambda: self._run(self._sum),
            "gather": lambda: self._run(self._gather),
        }

    def trace(self, name: str) -> None:
        """Traces a step by hand, which takes long on a slow machine; nothing waits."""
        step = self._by_hand.get(name)
        if isinstance(step, tf.types.experimental.PolymorphicFunction):
            step.get_concrete_function()

    def call(self, name: str) -> None:
        """Makes a call.

        Args:
            name: String of `LOOPS` or `BY_HAND`, `END`, or a method and a change, as
                in `"fit, rows"`.
        """
        method, _, change = name.partition(", ")
        if method in METHODS:
            self._call_method(method, change)
        elif name == "test_on_batch":
            self._call_method(name, "")
        elif name == "fit by twos":
            self._model = self._build(steps_per_execution=2)
            self._call_method("fit", "")
        elif name == "fit that sums":
            self._call_method("fit", "", callbacks=[_Sums(self._by_hand["sum"])])
        elif name == "save":
            tfdp.checkpoint.save(self._model, f"{self._state}/checkpoint")
        elif name in BY_HAND:
            for _ in range(NUM_STEPS):
                self._by_hand[name]()

    def _build(self, **settings: Any) -> keras.Model:
        with self._strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse", **settings)
        return model

    def _call_method(self, method: str, change: str, **given: Any) -> None:
        rows = NUM_ROWS // 2 if change == "rows" else NUM_ROWS
        columns = 4 if change == "shape" else 8
        x = np.ones((rows, columns), "float64" if change == "dtype" else "float32")
        y = np.ones((rows, 1), "float32")
        arrays = [x] if method == "predict" else [x, y]
        if method.endswith("_on_batch"):
            batch = [array[: BATCH * rows // NUM_ROWS] for array in arrays]
            for _ in range(NUM_STEPS):
                getattr(self._model, method)(*batch)
            return
        given["batch_size"] = BATCH // 2 if change == "batch_size" else BATCH
        if method == "fit":
            given["epochs"] = NUM_STEPS * BATCH // NUM_ROWS
        getattr(self._model, method)(*arrays, verbose=0, **given)

    def _run(self, step: Callable[..., Any], *args: Any) -> None:
        self._strategy.run(step, args)

    def _sum(self, size: int = 2) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("sum", tf.ones([size]))

    def _gather(self) -> Any:
        return tfdp.all_gather(tf.ones([2, 2]))


class _Sums(keras.callbacks.Callback):
    """A callback that runs a collective."""

    def __init__(self, add: Callable[[], None]) -> None:
        super().__init__()
        self._add = add

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._add()
