"""A checkpoint of four replicas goes on as if nothing had happened, on any number.

Both kinds of file: what `tfdp.checkpoint` writes, and Keras's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.exactness import cases_exactness as exactness
from tests.exactness import exactness_model as model_of
from tests.harness import registry
from tests.harness.env import Env

case = registry.case
BATCH_SIZE = 24  # for 1, 2, 3, 4 and 8 replicas alike
BEFORE, AFTER = 3, 4  # updates before and after the checkpoint
SAVED_ON = 4
# Where it is restored, and how the state lies there.
TARGETS = ((1, "none"), (2, "gradients"), (3, "optimizer"), (8, "optimizer"))
KINDS = ("directory", "file")


@dataclasses.dataclass(frozen=True)
class Trainee:
    """A model and how to train it."""

    model: keras.Model
    x: list[np.ndarray]
    y: np.ndarray

    def train(self, first: int, count: int) -> None:
        """Makes updates from some batch on."""
        rows = slice(first * BATCH_SIZE, (first + count) * BATCH_SIZE)
        self.model.fit(
            [array[rows] for array in self.x],
            self.y[rows],
            batch_size=BATCH_SIZE,
            shuffle=False,
            verbose=0,
        )


def trainee(num_replicas: int, row: Any, sharding: str) -> Trainee:
    """A new model on the first so many devices."""
    keras.utils.set_random_seed(exactness.SEED)
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    strategy = tfdp.MirroredStrategy(devices) if num_replicas > 1 else None
    x, y = model_of.make_data((BEFORE + AFTER) * BATCH_SIZE // model_of.BATCH_SIZE)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of.build_model()
        optimizer = row.make(use_ema=True, ema_momentum=0.9)
        model.compile(
            optimizer=tfdp.DistributedOptimizer(optimizer, sharding=sharding),
            loss="mse",
            jit_compile=False,
        )
        model.optimizer.build(model.trainable_variables)
    return Trainee(model, x, y)


def move(env: Env, row: Any, targets: Any, sharding: str = "optimizer") -> None:
    """Saves on four replicas, and compares what follows on others with that."""
    source = trainee(SAVED_ON, row, sharding)
    source.train(0, BEFORE)
    tfdp.checkpoint.save(source.model, env.tmp / "directory")
    source.model.save_weights(env.tmp / "file.weights.h5")
    source.train(BEFORE, AFTER)
    wanted = [np.asarray(w) for w in source.model.get_weights()]
    for (num_replicas, sharding), kind in targets:
        target = trainee(num_replicas, row, sharding)
        if kind == "directory":
            tfdp.checkpoint.restore(target.model, env.tmp / "directory")
        else:
            target.model.load_weights(env.tmp / "file.weights.h5")
        target.train(BEFORE, AFTER)
        for variable, found, value in zip(
            target.model.weights, target.model.get_weights(), wanted, strict=True
        ):
            error = abs(found - value).max() / max(abs(value).max(), 1e-3)
            where = f"{variable.path}, {kind}, on {num_replicas}, {sharding}"
            assert error <= row.tolerance("float32"), f"{where}: {error:.2g}"
    tf.keras.backend.clear_session()
    gc.collect()


# What is always tested: each target, each kind of file, both ways to own state.
COVERING = {
    "adamw": [(TARGETS[0], "directory"), (TARGETS[2], "directory")],
    "lamb": [(TARGETS[3], "file"), (TARGETS[1], "file")],
}


def _register(number: int, name: str) -> None:
    # In the full tier every optimizer moves by both kinds of file to some targets.
    pairs = list(itertools.product(TARGETS, KINDS))
    several = [pairs[number % len(pairs)], pairs[(number + 3) % len(pairs)]]

    def function(env: Env) -> dict:
        move(env, exactness.ROWS[name], COVERING.get(name, several))
        return {}

    registry.register(
        f"checkpoint_moves_with_{name}",
        function,
        f"moving checkpoints: {exactness.ROWS[name].title}",
        setups=("eight_devices",),
        same_as="files_of_sharded_parameters_are_those_of_plain_keras",
        compare=False,
        # Eight replicas on two cores, traced for each number of them.
        deadline_seconds=280.0,
    )


for _number, _name in enumerate(exactness.ROWS):
    _register(_number, _name)


# From sharded parameters to every stage, and back: by row, what is sharded before.
PARAMETERS: dict[str, tuple[str, list]] = {
    "adamw": (
        "parameters",
        [
            ((1, "none"), "directory"),
            ((2, "gradients"), "file"),
            ((3, "parameters"), "directory"),
        ],
    ),
    "lamb": (
        "parameters",
        [((2, "parameters"), "file"), ((2, "optimizer"), "directory")],
    ),
    "nadam": (
        "gradients",
        [((2, "parameters"), "directory"), ((3, "parameters"), "file")],
    ),
}


def _register_parameters(name: str, sharding: str, targets: list) -> None:
    def function(env: Env) -> dict:
        move(env, exactness.ROWS[name], targets, sharding)
        return {}

    registry.register(
        f"checkpoint_moves_with_parameters_of_{name}",
        function,
        f"moving checkpoints of sharded parameters: {exactness.ROWS[name].title}",
        setups=("eight_devices",),
        same_as="files_of_sharded_parameters_are_those_of_plain_keras",
        compare=False,
        deadline_seconds=280.0,
    )


for _name, (_sharding, _targets) in PARAMETERS.items():
    _register_parameters(_name, _sharding, _targets)
