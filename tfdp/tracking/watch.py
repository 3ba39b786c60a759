"""Watch for trackers that a script imports, where another worker logs."""

from __future__ import annotations

import functools

import wrapt

from tfdp.tracking import mlflow_store, weights_and_biases
from tfdp.tracking.first_worker import is_silent, note_rank


def watch_trackers() -> None:
    """Have trackers that are imported, now or later, make no run on this worker.

    On the first worker, and in a single process, nothing is done.
    """
    if is_silent():
        _register()


def follow(rank: int) -> None:
    """Watch where a strategy knows for sure which worker this is.

    Args:
        rank: Int.
    """
    note_rank(rank)
    watch_trackers()


@functools.cache
def _register() -> None:
    wrapt.register_post_import_hook(weights_and_biases.watch, "wandb")
    wrapt.register_post_import_hook(mlflow_store.watch, "mlflow")
