"""Timed steps of Keras `fit`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdp.launch.bench.keras_models import build, make_batch
from tfdp.launch.bench.models import Model


class Clock(keras.callbacks.Callback):
    """Clock of steps.

    Args:
        skipped: Int, steps at the start that are not timed.
    """

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self._skipped = skipped

    def on_train_begin(self, logs: Any = None) -> None:
        """Forget the `fit` before."""
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take the time."""
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Float, a step: the mean, which includes what happens now and then."""
        timed = self.times[self._skipped :]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


def timed_fit(
    model: Any, batch: Sequence[np.ndarray], skipped: int = 0
) -> Callable[..., float]:
    """Seconds per step of `fit` on a batch that repeats, from the end of a step on.

    Args:
        model: Compiled `keras.Model`.
        batch: Inputs and labels, of all replicas.
        skipped: Int, steps that are not timed, beside the first. Defaults to `0`.

    Returns:
        Callable that takes a number of steps, and callbacks, and returns seconds per
        step.
    """

    def run(steps: int, *callbacks: Any) -> float:
        clock = Clock(skipped)
        x, y = (np.concatenate([part] * (steps + skipped + 1)) for part in batch)
        model.fit(
            x,
            y,
            batch_size=len(batch[0]),
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, clock],
        )
        return clock.seconds

    return run


def fit_arm(
    strategy: Any,
    model: Model,
    *,
    batch_size: int = 32,
    jit_compile: bool = False,
    make_optimizer: Callable[[], Any] | None = None,
) -> Callable[..., float]:
    """Timed `fit` of a new model, by SGD as the loops of the other sides.

    Args:
        strategy: Strategy or `None`.
        model: `Model`.
        batch_size: Int, samples of each replica. Defaults to `32`.
        jit_compile: Bool, as of `compile`. Defaults to `False`.
        make_optimizer: Callable that returns a Keras optimizer. Defaults to SGD.

    Returns:
        Callable, as of `timed_fit`.

    Example:

    >>> fit = fit_arm(None, Model("mlp", 8))
    >>> 0 < fit(3) < 10
    True
    """
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        network = build(model)
        network.compile(
            make_optimizer() if make_optimizer else keras.optimizers.SGD(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=jit_compile,
        )
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    return timed_fit(network, make_batch(model, batch_size * num_replicas))
