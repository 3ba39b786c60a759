"""Global seeds and random states of TensorFlow and Keras."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils
from tensorflow.python.eager import context
from tensorflow.python.ops import stateful_random_ops


def random_state() -> str:
    """The state from which TensorFlow's unseeded operations take their seeds."""
    rng = getattr(context.context(), "_rng", None)  # set by set_random_seed
    return repr((context.global_seed(), rng.getstate() if rng else None))


@contextlib.contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed, and the user's again afterwards."""
    eager = context.context()
    names = ("_seed", "_rng")
    before = {name: getattr(eager, name) for name in names if hasattr(eager, name)}
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        vars(eager).update(before)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`, or `None`."""
    return context.global_seed()


def tensorflow_random_state() -> dict[str, Any]:
    """TensorFlow's global seed and what it draws the seeds of operations from."""
    rng = getattr(context.context(), "_rng", None)  # set by set_random_seed
    generator = getattr(stateful_random_ops, "global_generator", None)
    seed = context.global_seed()
    return {
        "seed": seed,
        "rng": None if rng is None else rng.getstate(),
        "generator": None if generator is None else generator.state.numpy().tolist(),
    }


def set_tensorflow_random_state(state: dict[str, Any]) -> None:
    """Set what `tensorflow_random_state` returned, also after JSON."""
    eager = context.context()
    vars(eager)["_seed"] = state["seed"]
    if state["rng"] is not None:
        version, words, gauss = state["rng"]
        rng = getattr(eager, "_rng", None) or random.Random()
        rng.setstate((version, tuple(words), gauss))
        vars(eager)["_rng"] = rng
    if state["generator"] is not None:
        generator = tf.random.get_global_generator()
        generator.state.assign(tf.constant(state["generator"], generator.state.dtype))


def keras_global_seed() -> int | None:
    """The seed of `keras.utils.set_random_seed`, or `None`."""
    return rng_utils.get_random_seed()


def set_keras_global_seed(seed: int) -> None:
    """Seed Keras's own generator as `keras.utils.set_random_seed` does."""
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, None)


def keras_seed_state() -> list[int] | None:
    """The state of the generator that layers without a seed draw from, if it is."""
    found = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return None if found is None else np.asarray(found.state.numpy()).tolist()


def set_keras_seed_state(state: list[int] | None) -> None:
    """Set what `keras_seed_state` returned."""
    if state is not None:
        own = seed_generator.global_seed_generator().state
        own.assign(np.asarray(state, own.dtype))
