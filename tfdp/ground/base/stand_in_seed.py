"""Stand-in seed: a global seed of TensorFlow if the user has set none.

TensorFlow combines a global seed with an operation's seed. So a stand-in seed would
change the numbers of operations with a seed of their own.
`tfdp.training.keras_hooks.runtime_hooks.seeds_of_operation` keeps theirs.
"""

from __future__ import annotations

import tensorflow as tf

# The last seed of `set_seed` in this process; an empty list before the first call.
_stand_in: list[int] = []


def seed() -> int | None:
    """Return the last seed of this module's `set_seed`, or `None`."""
    return _stand_in[-1] if _stand_in else None


def set_seed(value: int) -> None:
    """Set TensorFlow's global seed, and record it as not chosen by the user.

    Args:
        value: Int, the seed.
    """
    _stand_in[:] = [value]
    tf.random.set_seed(value)
