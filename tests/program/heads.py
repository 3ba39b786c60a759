"""Many small programs in one model: each has an output of its own.

A fit costs a second, whatever it trains. So that many losses or metrics share one, a
model has as many outputs, and each of these has a loss and metrics for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env

# Four batches of 11 rows, which no set-up divides, and one of a single row.
NUM_ROWS, BATCH_ROWS = 45, 11
# Where a single row gives no number: two batches of 16 rows and one of 13.
MORE_ROWS = 16
NUM_COLUMNS = 3


def features() -> np.ndarray:
    """Return features: `(NUM_ROWS, NUM_FEATURES)`, float64."""
    return common.features(NUM_ROWS).astype("float64")


def columns(x: np.ndarray) -> np.ndarray:
    """Return numbers between 0 and 1: `(rows, NUM_COLUMNS)`."""
    noise = np.random.default_rng(1).normal(size=(len(x), NUM_COLUMNS))
    return 1 / (1 + np.exp(-x[:, :NUM_COLUMNS] - 0.5 * noise))


def labels(x: np.ndarray) -> np.ndarray:
    """Return one-hot labels: `(rows, NUM_COLUMNS)`."""
    return np.eye(NUM_COLUMNS)[np.argmax(columns(x), axis=1)]


def with_heads(names: Any, last: Callable) -> keras.Model:
    """Return a model with an output of its own for each name.

    Args:
        names: Iterable of strings.
        last: Callable of a name that returns the layer of its output.
    """
    inputs = keras.Input((common.NUM_FEATURES,))
    h = keras.layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, {name: last(name)(h) for name in names})


def train_heads(
    env: Env,
    losses: Mapping[str, Any],
    last: Callable | None = None,
    targets: Callable = columns,
    *,
    batch_rows: int = BATCH_ROWS,
    rate: float = 0.02,
    epochs: int = 2,
    fit_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict:
    """Train a model with one output for each loss, in float64.

    Args:
        env: `Env`.
        losses: Mapping from the name of an output to its loss.
        last: Callable of a name that returns the layer of its output. Defaults to
            sigmoids of `NUM_COLUMNS` units.
        targets: Callable of features that returns the targets of all outputs.
        batch_rows: Int, rows of a batch. Defaults to `BATCH_ROWS`.
        rate: Float, the learning rate.
        epochs: Int.
        fit_options: Mapping of options of `fit`.
        **options: Of `compile`.

    Returns:
        Nest of the history, with that of a validation, what `evaluate` returns, and
        the weights.
    """

    def sigmoids(name: str) -> keras.layers.Layer:
        return keras.layers.Dense(NUM_COLUMNS, activation="sigmoid", name=name)

    def build() -> keras.Model:
        model = with_heads(losses, last or sigmoids)
        return common.compiled(
            model, keras.optimizers.SGD(rate), dict(losses), **options
        )

    x = features()
    y = {name: targets(x) for name in losses}
    model = common.build_in_scope(env, build)
    history = common.fit(
        model,
        x,
        y,
        batch_size=batch_rows,
        epochs=epochs,
        validation_data=(x, y),
        validation_batch_size=batch_rows,
        **(fit_options or {}),
    )
    return {"history": history, "weights": env.weights(model)}
