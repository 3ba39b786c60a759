"""Agreement of all workers on the seeds of the global random generators.

With several workers, the global seed of TensorFlow becomes a stand-in seed, unless the
user has set the same one on all workers. TensorFlow combines a global seed with an
operation's own seed, so a stand-in seed would change the numbers of operations that
have one.
`tfdp.training.keras_hooks.runtime_hooks.seeds_of_operation` keeps their numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground._compat import random_seeds

# A global seed that tfdp has set must not count as the user's. So the last one of this
# process is kept here; the list is empty as long as there is none.
_stand_in: list[int] = []


def agree_on_seed(strategy: Any) -> None:
    """Give the global random generators the same state on all workers.

    Initial weights and the order of shuffled datasets come from the global generators.
    A generator with the same state on all workers keeps it. Any other one, and that of
    TensorFlow without a seed, gets a seed that the first worker has drawn.
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


def stand_in_seed() -> int | None:
    """Return the global seed that tfdp has set for TensorFlow last, or `None`.

    tfdp sets one with several workers, unless the user has set the same on all.
    """
    return _stand_in[-1] if _stand_in else None


def set_stand_in_seed(value: int) -> None:
    """Set TensorFlow's global seed, and record it as not chosen by the user.

    Args:
        value: Int, the seed.
    """
    _stand_in[:] = [value]
    tf.random.set_seed(value)


_SET_SEED: dict[str, Callable] = {
    "python": random.seed,
    "numpy": np.random.seed,
    "tensorflow": set_stand_in_seed,
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
    # For Keras, the global seed and the state of its seed generator are compared.
    # Without a seed Keras draws from Python's generator, which `"python"` compares.
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
