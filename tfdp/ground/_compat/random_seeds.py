"""Global seeds and random states of TensorFlow and Keras."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils
from tensorflow.python.eager import context
from tensorflow.python.framework import config
from tensorflow.python.ops import stateful_random_ops

# Key of Keras's global state for the generator of draws without a seed. Keras 3.12 has
# no constant for the key.
_SEED_GENERATOR = "global_seed_generator"
_seed_lock = threading.RLock()


def is_deterministic() -> bool:
    """Return whether TensorFlow's `enable_op_determinism` was called."""
    return config.is_op_determinism_enabled()


def random_state() -> str:
    """Return, as a text, the state from which unseeded operations draw their seeds."""
    # `_rng` does not exist before a call of `tf.random.set_seed`, so its default is
    # `None`.
    rng = getattr(context.context(), "_rng", None)
    return repr((context.global_seed(), rng.getstate() if rng else None))


@contextlib.contextmanager
def temporary_seed(seed: int) -> Iterator[None]:
    """Set TensorFlow's global seed in the block, and restore the user's at its end.

    A thread that enters such a block waits until other threads have left theirs, since
    it would otherwise restore their seed instead of the user's.
    """
    eager = context.context()
    names = ("_seed", "_rng")
    with _seed_lock:
        before = {name: getattr(eager, name) for name in names if hasattr(eager, name)}
        tf.random.set_seed(seed)
        try:
            yield
        finally:
            vars(eager).update(before)


def global_seed() -> int | None:
    """Return the seed that `tf.random.set_seed` has set, or `None` if none is set."""
    return context.global_seed()


def tensorflow_random_state() -> dict[str, Any]:
    """Return TensorFlow's seed and generator states by name, as values for JSON."""
    # `_rng` does not exist before a call of `tf.random.set_seed`, so its default is
    # `None`.
    rng = getattr(context.context(), "_rng", None)
    generator = getattr(stateful_random_ops, "global_generator", None)
    seed = context.global_seed()
    return {
        "seed": seed,
        "rng": None if rng is None else rng.getstate(),
        "generator": None if generator is None else generator.state.numpy().tolist(),
    }


def set_tensorflow_random_state(state: dict[str, Any]) -> None:
    """Restore a result of `tensorflow_random_state`, even if read from JSON."""
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
    """Return the seed that `keras.utils.set_random_seed` has set; `None` if none is."""
    return rng_utils.get_random_seed()


def set_keras_global_seed(seed: int) -> None:
    """Seed Keras's own generator as `keras.utils.set_random_seed` does."""
    global_state.set_global_attribute(rng_utils.GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(_SEED_GENERATOR, None)


def generators_of(model: Any) -> list:
    """Return all `SeedGenerator`s from which a model may draw.

    They are those of its layers, and of the generator for draws without a seed.
    """
    layers = model._flatten_layers()  # private; checked on Keras 3.12 to 3.15
    generators = [g for layer in layers for g in layer._seed_generators]
    common = global_state.get_global_attribute(_SEED_GENERATOR)
    return generators if common is None else [*generators, common]


def seed_variables(model: Any) -> list:
    """Return the states of all generators from which a model may draw, as variables.

    They are those of `generators_of`, and that of TensorFlow's global generator.
    """
    generator = getattr(stateful_random_ops, "global_generator", None)
    states = [each.state for each in generators_of(model)]
    return states if generator is None else [*states, generator.state]


def advance(generator: Any, num_draws: int) -> None:
    """Advance a `SeedGenerator` by draws of random numbers.

    Args:
        generator: `SeedGenerator`, one of `generators_of`.
        num_draws: Int, number of draws.
    """
    # Keras calls `next(ordered=False)` on the generator for draws without a seed, which
    # changes its state in another way than `next()` does.
    is_common = generator is global_state.get_global_attribute(_SEED_GENERATOR)
    for _ in range(num_draws):
        generator.next(ordered=not is_common)


def keras_seed_state() -> list[int] | None:
    """Return the state of the generator from which layers without a seed draw.

    It is `None` as long as Keras has not created the generator.
    """
    generator = global_state.get_global_attribute(_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state.numpy()).tolist()


def set_keras_seed_state(state: list[int] | None) -> None:
    """Set the state of the generator from which layers without a seed draw.

    Args:
        state: List of ints, a result of `keras_seed_state`; `None` changes nothing.
    """
    if state is not None:
        current = seed_generator.global_seed_generator().state
        current.assign(np.asarray(state, current.dtype))
