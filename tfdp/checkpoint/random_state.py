"""State of the global random generators that a training script uses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tfdp.ground._compat import random_seeds
from tfdp.training.replicas.random_seed import set_stand_in_seed, stand_in_seed


def random_states() -> dict[str, Any]:
    """Return the global random states of Python, NumPy, TensorFlow and Keras.

    Returns:
        Dict that JSON supports.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "tensorflow": _tensorflow_state(),
        "keras": random_seeds.keras_seed_state(),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the states of this process's global random generators.

    Args:
        states: Dict, as `random_states` returns it.
    """
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, "uint32"), position, has_gauss, cached))
    state = states["tensorflow"]
    if state.get("stands_in"):
        set_stand_in_seed(state["seed"])
    random_seeds.set_tensorflow_random_state(state)
    random_seeds.set_keras_seed_state(states["keras"])


def _tensorflow_state() -> dict[str, Any]:
    """Return the state of TensorFlow's global generators, as a dict for JSON.

    Its field `stands_in` is true if tfdp, and not the user, has set the global seed.
    """
    state = random_seeds.tensorflow_random_state()
    seed = state["seed"]
    return {**state, "stands_in": seed is not None and seed == stand_in_seed()}


def gather_random_states(worker_group: Any) -> list[dict[str, Any]]:
    """Gather the random states of all workers. All workers call it together.

    Args:
        worker_group: `WorkerGroup` between the workers.

    Returns:
        List of dicts by worker, or of a single one if all are equal.
    """
    states = worker_group.all_gather("random states", random_states())
    are_equal = all(state == states[0] for state in states)
    return states[:1] if are_equal else states


def restore_random_states(states: list[dict[str, Any]], worker_group: Any) -> None:
    """Restore the random states of this worker, or else those of worker 0.

    Those of worker 0 are used unless there is one dict for each worker of this run.

    Args:
        states: List of dicts, as `gather_random_states` returned it when saving.
        worker_group: `WorkerGroup` between the workers.
    """
    has_own_state = len(states) == worker_group.num_workers
    set_random_states(states[worker_group.rank if has_own_state else 0])
