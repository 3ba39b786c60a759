"""The worker group of a model, also of one without a tfdp strategy."""

from __future__ import annotations

import weakref

import keras

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.base.context import strategy_of

# A model without a strategy trains on one worker. Its group is kept while the model
# exists, so that all callers get the same one.
_alone: weakref.WeakKeyDictionary[keras.Model, WorkerGroup]
_alone = weakref.WeakKeyDictionary()


def worker_group_of(model: keras.Model) -> WorkerGroup:
    """Return the worker group of a model's strategy, or one of a single worker."""
    strategy = strategy_of(model)
    if strategy is None:
        return _alone.setdefault(model, WorkerGroup(0, 1))
    return strategy.extended.worker_group
