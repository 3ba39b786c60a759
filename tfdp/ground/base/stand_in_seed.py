"""A global seed of TensorFlow that stands in for one that the user has not set.

With a global seed TensorFlow takes both it and an operation's own, so that operations
with a seed would draw other numbers than where the user has set no global one.
`tfdp.training.keras_hooks.runtime_hooks.seeds_of_operation` leaves them theirs.
"""

from __future__ import annotations

import tensorflow as tf

# The seed of this process, if any.
_stand_in: list[int] = []


def seed() -> int | None:
    """The seed of `set_seed` that was set last, or `None`."""
    return _stand_in[-1] if _stand_in else None


def set_seed(value: int) -> None:
    """Set a global seed that changes only what has no seed of its own.

    Args:
        value: Int, the seed.
    """
    _stand_in[:] = [value]
    tf.random.set_seed(value)
