"""Agreement of all workers on the seeds of the global random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdp.ground._compat import random_seeds
from tfdp.ground.base import stand_in_seed


def agree_on_seed(strategy: Any) -> None:
    """Give the global random generators the same state on all workers.

    Initial weights and the order of shuffled datasets come from the global generators.
    A generator with the same state on all workers keeps it. Any other one is seeded
    with the first worker's random seed on all workers.
    """
    worker_group = strategy.extended.worker_group
    if worker_group.num_workers == 1:
        return
    # The seed is drawn from the operating system, because a draw from one of the user's
    # generators would change the state of the generator.
    local = {"seed": random.SystemRandom().getrandbits(30), "states": _random_states()}
    gathered = worker_group.all_gather("random seed", local)
    for name, set_seed in _SET_SEED.items():
        states = {each["states"][name] for each in gathered}
        if len(states) > 1 or states == {_UNSEEDED}:
            set_seed(gathered[0]["seed"])


_SET_SEED: dict[str, Callable] = {
    "python": random.seed,
    "numpy": np.random.seed,
    "tensorflow": stand_in_seed.set_seed,
    "keras": random_seeds.set_keras_global_seed,
}
_UNSEEDED = "unseeded"


def _random_states() -> dict[str, str]:
    """Hash the states of the generators of Python, NumPy, TensorFlow and Keras.

    Returns:
        Dict from the name of a generator to hexadecimal digits, or to `"unseeded"` for
        TensorFlow's generator without a global seed.
    """
    has_seed = random_seeds.global_seed() is not None
    # Keras without a seed draws from Python's generator, which has a separate entry.
    keras_state = (random_seeds.keras_global_seed(), random_seeds.keras_seed_state())
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow": random_seeds.random_state(),
        "keras": keras_state,
    }
    hashes = {n: hashlib.sha256(repr(s).encode()) for n, s in states.items()}
    texts = {name: value.hexdigest() for name, value in hashes.items()}
    return texts if has_seed else {**texts, "tensorflow": _UNSEEDED}
