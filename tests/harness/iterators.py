"""Iterators of plain Keras whose deletion makes no test wait."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import tensorflow as tf

# Nearly all deletions take less. TensorFlow sleeps in some of them, up to a minute: see
# `delete_in_background` in `tfdp/training/data/uneven_inputs.py`, by which those of
# tfdp's own iterators make nobody wait.
_MAX_SECONDS = 0.1


def delete_in_background() -> None:
    """Lets threads finish what TensorFlow does when an iterator is deleted.

    Otherwise the thread waits that deletes it. If it is garbage, that is any thread of
    the process, such as one that has to answer other workers.
    """
    make = tf.data.Dataset.__iter__

    def make_and_watch(dataset: tf.data.Dataset) -> Any:
        iterator = make(dataset)
        kept = [getattr(iterator, "_iterator_resource", None)]
        weakref.finalize(iterator, _delete, kept).atexit = False
        return iterator

    tf.data.Dataset.__iter__ = make_and_watch


def _delete(kept: list) -> None:
    thread = threading.Thread(target=kept.clear, daemon=True)
    # A process that exits starts no thread any more.
    with contextlib.suppress(RuntimeError):
        thread.start()
        thread.join(_MAX_SECONDS)
