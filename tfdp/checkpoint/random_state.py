"""State of the random generators that a training script draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tfdp.ground import _compat
from tfdp.ground.base import stand_in_seed


def random_states() -> dict[str, Any]:
    """States of Python's, NumPy's, TensorFlow's and Keras's global generators.

    Returns:
        Dict that JSON can hold.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "tensorflow": _state_of_tensorflow(),
        "keras": _compat.keras_seed_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states of the generators.

    Args:
        states: Dict, what `random_states` returned.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, "uint32"), position, has_gauss, cached))
    state = states["tensorflow"]
    if state.get("stands_in"):
        stand_in_seed.set_seed(state["seed"])
    _compat.set_tensorflow_random_state(state)
    _compat.set_keras_seed_state(states["keras"])


def _state_of_tensorflow() -> dict[str, Any]:
    """TensorFlow's state, and whether its seed is one that the user has not set."""
    state = _compat.tensorflow_random_state()
    seed = state["seed"]
    return {**state, "stands_in": seed is not None and seed == stand_in_seed.seed()}


def gather_random_states(worker_group: Any) -> list[dict[str, Any]]:
    """Gather the random states of each worker, or one if all are alike.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """
    states = worker_group.all_gather("random states", random_states())
    alike = all(state == states[0] for state in states)
    return states[:1] if alike else states


def restore_random_states(states: list[dict[str, Any]], worker_group: Any) -> None:
    """Restore this worker's random states, or the first's on other numbers of workers.

    Args:
        states: List of dicts, what `gather_random_states` returned.
        worker_group: `WorkerGroup` between the workers.
    """
    is_own = len(states) == worker_group.num_workers
    set_random_states(states[worker_group.rank if is_own else 0])
