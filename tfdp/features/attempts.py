"""Further attempts of a call of `fit`, from the newest backup and within the call.

To the user's callbacks all attempts are one call. The data is read again in the order
of the first attempt.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground._compat import tf_data
from tfdp.ground.base.feature import Fit
from tfdp.training.data.stages import restart_shuffles
from tfdp.training.keras_hooks.worker_callbacks import backup_callbacks, callback_list

# Prefix of the modules of tfdp's callbacks. They begin anew in each attempt of `fit`,
# to resume from a backup; for the user's callbacks all attempts are one `fit`.
_OWN = "tfdp."
# The first `fit` that has read each dataset that reshuffles. Only this call can repeat
# the order of its data: the order of a later `fit` depends on the earlier iterations.
_readers: weakref.WeakKeyDictionary[Any, weakref.ref[Fit]] = weakref.WeakKeyDictionary()


def why_not_read_again(fit: Fit) -> str:
    """Return why the data of `fit` cannot be read again in the same order, or `""`.

    It records the first `fit` of each dataset that reshuffles. Only that call can
    repeat the order: for a later `fit` with the same dataset, a reason is returned.

    Args:
        fit: `Fit`, a call of `fit` that was not repeated yet.

    Returns:
        String, the rest of an error message that begins with the name of the feature
        that reads the data again, such as `'`on_loss="continue"`'`.
    """
    for name in ("x", "validation_data"):
        data = fit.arguments.get(name)
        if isinstance(data, Iterator):
            return (
                "reads the data again: pass a `tf.data.Dataset` or arrays to `fit`, "
                f"not an iterator. Received: {name}={data!r}"
            )
        if isinstance(data, tf.data.Dataset) and restart_shuffles(data) is None:
            return (
                "reads the data again, in the same order: of the stages after "
                "`shuffle` only `map`, `batch`, `prefetch`, `take`, `skip` and "
                "`repeat` can be repeated. Shuffle later, or with "
                "`reshuffle_each_iteration=False`."
            )
    data = fit.arguments.get("x")
    if isinstance(data, tf.data.Dataset) and tf_data.reshuffles(data):
        reader = _readers.setdefault(data, weakref.ref(fit))()
        if reader is not fit:
            return (
                "repeats the order of the data, which depends on earlier calls of "
                "`fit`: create the dataset anew for each call."
            )
    return ""


def restart_data(arguments: dict[str, Any]) -> None:
    """Replace a loop's datasets by ones that repeat the order of its first attempt.

    A dataset whose order cannot be repeated stays: `fit` was refused before with such
    data, and `evaluate` and `predict` need no order.

    Args:
        arguments: Dict, the arguments of `fit`, `evaluate` or `predict` by name, which
            is changed in place.
    """
    restarted: dict[int, tf.data.Dataset] = {}
    for key in ("x", "validation_data"):
        if isinstance(data := arguments.get(key), tf.data.Dataset):
            repeated = restart_shuffles(data, restarted)
            arguments[key] = data if repeated is None else repeated


def continue_callbacks(
    callbacks: Any, stack: contextlib.ExitStack, begun: Container[int] | None = None
) -> None:
    """Let callbacks continue in the next attempt of `fit`, without `on_train_begin`.

    Callbacks of the user and of Keras continue. Those of tfdp begin anew, and backup
    callbacks get `is_retry = True`, so that they resume a state of this call of `fit`.
    A `CSVLogger` that has not begun appends to its file, which another worker wrote.

    Args:
        callbacks: The callbacks argument of the call of `fit`.
        stack: `contextlib.ExitStack`, closed at the end of that call; it then restores
            `on_train_begin` and `is_retry`.
        begun: Container of the `id`s of the callbacks that have begun on this worker,
            or `None` for all. Defaults to `None`.
    """
    for callback in filter(is_user_callback, callback_list(callbacks)):
        if begun is None or id(callback) in begun:
            stack.enter_context(_without_begin(callback))
        elif isinstance(callback, keras.callbacks.CSVLogger):
            # In earlier attempts another worker has written the file of `CSVLogger`,
            # which would otherwise be overwritten.
            callback.append = True
    for callback in backup_callbacks(callbacks):
        callback.is_retry = True
        stack.callback(setattr, callback, "is_retry", False)


def is_user_callback(callback: Any) -> bool:
    """Return whether a callback is the user's or Keras's, and not one of tfdp."""
    return not type(callback).__module__.startswith(_OWN)


@contextlib.contextmanager
def _without_begin(callback: Any) -> Iterator[None]:
    """Disable `on_train_begin` of a callback in this `with` block."""
    missing = object()
    before = vars(callback).get("on_train_begin", missing)
    callback.on_train_begin = lambda logs=None: None
    try:
        yield
    finally:
        del callback.on_train_begin
        if before is not missing:
            callback.on_train_begin = before
