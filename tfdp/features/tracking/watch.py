"""Watch for trackers that a script imports, where another worker logs."""

from __future__ import annotations

import functools

import wrapt

from tfdp.features.tracking import mlflow_store, weights_and_biases
from tfdp.features.tracking.first_worker import is_silent, note_rank
from tfdp.ground.base.feature import Feature, register


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


class _Tracking(Feature):
    def on_strategy(self, rank: int) -> None:
        """Watch from when a strategy knows for sure which worker this is."""
        follow(rank)


register(_Tracking())


@functools.cache
def _register() -> None:
    wrapt.register_post_import_hook(weights_and_biases.watch, "wandb")
    wrapt.register_post_import_hook(mlflow_store.watch, "mlflow")
