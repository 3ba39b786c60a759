"""Small programs: what users write into layers and steps, on one device and on others.

A program is a function of an `Env` that returns results. A case runs many of them, so
that each costs its own tracing and no process.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tests.harness import registry
from tests.harness.env import Env

# Batches of 15, 15 and one row: no number of replicas divides them.
NUM_ROWS = 31
BATCH_SIZE = 15

Program = Callable[[Env], dict]


class Programs(list):
    """Programs of one kind, to which the decorator `add` adds one."""

    def add(self, program: Program) -> Program:
        self.append(program)
        return program

    def layers(self, name: str, build: Callable[[], list], **options: Any) -> None:
        """Adds a program that fits a sequence of layers, see `fit_layers`."""

        def program(env: Env) -> dict:
            return fit_layers(env, build, **options)

        program.__name__ = name
        self.append(program)


def register(
    name: str, covers: str, programs: Sequence[Program], **options: Any
) -> None:
    """Registers a case of programs."""

    def run(env: Env) -> dict:
        return run_all(env, programs)

    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    run.__module__ = caller.f_globals["__name__"]  # type: ignore[union-attr]
    options = {"deadline_seconds": 600.0} | options
    registry.register(name, run, covers, **options)


def named(*names: str, of: Sequence[Program]) -> list[Program]:
    """Returns the programs of these names, for a case of the quick tier."""
    found = {program.__name__: program for program in of}
    return [found[name] for name in names]


def run_all(env: Env, programs: Sequence[Program]) -> dict:
    """Runs programs one after the other; raises with all that fail."""
    results, faults = {}, []
    for program in programs:
        keras.utils.set_random_seed(1)
        try:
            results[program.__name__] = program(env)
        except Exception:  # noqa: BLE001
            faults.append(f"{program.__name__}: {traceback.format_exc(limit=-4)}")
    assert not faults, "\n".join(faults)
    return results


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns `NUM_ROWS` normal rows of a shape."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(NUM_ROWS, *shape)).astype("float32")


def tokens(length: int = 5, count: int = 9) -> np.ndarray:
    """Returns rows of tokens that end in zeros, the longest in the last batch."""
    rng = np.random.default_rng(0)
    found = rng.integers(1, count, size=(NUM_ROWS, length))
    kept = rng.integers(1, length - 1, size=(NUM_ROWS, 1))
    kept[7] = length - 1
    return np.where(np.arange(length) < kept, found, 0).astype("int32")


FEATURES = rows(6)
IMAGES = rows(6, 6, 2)
SEQUENCES = rows(5, 3)
TOKENS = tokens()


def targets(x: np.ndarray) -> np.ndarray:
    """Returns targets of shape `(NUM_ROWS, 1)` that depend on all of a row."""
    return np.sin(x.reshape(len(x), -1).sum(axis=1, keepdims=True)).astype("float32")


def sgd() -> keras.optimizers.Optimizer:
    """Returns SGD, which shows a wrong factor of a gradient."""
    return keras.optimizers.SGD(0.05, momentum=0.5)


def fit(
    env: Env, model: keras.Model, x: Any, y: Any = None, **options: Any
) -> dict[str, Any]:
    """Fits in order; returns history and weights by position."""
    options = {"batch_size": BATCH_SIZE, "epochs": 2, "shuffle": False} | options
    history = model.fit(x, y, verbose=0, **options).history
    return {"history": history, "weights": weights(env, model)}


def weights(env: Env, model: keras.Model) -> dict[str, np.ndarray]:
    """Reads weights by position: their names depend on the programs before."""
    found = {str(i): w for i, w in enumerate(env.weights(model).values())}
    assert all(np.isfinite(w.astype("float64")).all() for w in found.values())
    return found


def fit_layers(
    env: Env,
    build: Callable[[], list],
    *,
    x: np.ndarray = FEATURES,
    y: np.ndarray | None = None,
    loss: Any = "mse",
    optimizer: Callable[[], Any] = sgd,
    predicts: bool = False,
    metrics: Sequence[Any] = (),
    compiles: dict[str, Any] | None = None,
    **options: Any,
) -> dict:
    """Fits a sequence of layers behind an input of rows like `x`.

    Args:
        env: `Env`.
        build: Callable that makes the layers, in the scope.
        x: Array of inputs.
        y: Array of targets. Defaults to those of `targets`.
        loss: Loss of `compile`.
        optimizer: Callable that makes the optimizer.
        predicts: Whether predictions are returned, too.
        metrics: Metrics of `compile`.
        compiles: Further options of `compile`.
        **options: Options of `fit`.
    """
    with env.scope():
        model = keras.Sequential(
            [keras.Input(x.shape[1:], dtype=x.dtype.name), *build()]
        )
        model.compile(optimizer(), loss=loss, metrics=list(metrics), **(compiles or {}))
    results = fit(env, model, x, targets(x) if y is None else y, **options)
    if predicts:
        results["predicted"] = model.predict(x, batch_size=BATCH_SIZE, verbose=0)
    return results


class Perceptron(keras.Model):
    """A two-layer perceptron, whose step a program writes."""

    def __init__(self, units: int = 5) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(units, activation="tanh")
        self.last = keras.layers.Dense(1)
        self.hidden.build((None, 6))
        self.last.build((None, units))

    def call(self, x: Any, training: bool = False) -> Any:
        return self.last(self.hidden(x))


def fit_model(
    env: Env,
    make: Callable[[], keras.Model],
    *,
    x: np.ndarray = FEATURES,
    y: np.ndarray | None = None,
    optimizer: Callable[[], Any] = sgd,
    compiles: dict[str, Any] | None = None,
    **options: Any,
) -> dict:
    """Fits a model, see `fit_layers`."""
    with env.scope():
        model = make()
        model.build((None, *x.shape[1:]))
        model.compile(optimizer(), **({"loss": "mse"} | (compiles or {})))
    return fit(env, model, x, targets(x) if y is None else y, **options)
