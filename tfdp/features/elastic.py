"""Training that continues after the loss of workers: `on_loss="continue"`.

The workers that are left form a new cluster within `fit`, and run it again from the
newest state that `BackupAndRestore` has saved. To the user's callbacks it is one call.
A process that joins a running job begins `fit` alone, without the user's callbacks,
until everything is built; then it runs it again with the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.watch import ClusterChanges, WorkerLost
from tfdp.features.attempts import (
    continue_callbacks,
    is_of_user,
    restart_data,
    why_not_read_again,
)
from tfdp.ground import _compat
from tfdp.ground.base import loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.ground.text import pluralize
from tfdp.training.data.file_shards import FileShard
from tfdp.training.keras_hooks import configs
from tfdp.training.keras_hooks.worker_callbacks import (
    backup_callbacks,
    callback_list,
    other_callbacks,
)
from tfdp.training.optimizer.distributed import DistributedOptimizer
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.replicas import random_seed

# Arguments of `fit` that must be the same for a worker that joins.
_COMPARED = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "validation_split",
    "validation_steps",
    "validation_freq",
)


class Elastic(Feature):
    """Runs `fit` again, with the workers that are left, after the loss of others."""

    def __init__(self) -> None:
        self._num_fits = 0
        # The user's callbacks that have begun on this worker in the present `fit`.
        self._begun: list[weakref.ref[Any]] = []

    def choose_callbacks(self, fit: Fit) -> None:
        """Check that `fit` can continue after a loss; record what joiners compare.

        Raises:
            ValueError: If it cannot.
        """
        if not _continues(fit.strategy) or loops.current() is not None:
            return
        callbacks = fit.arguments.get("callbacks")
        if any(callback.is_again for callback in backup_callbacks(callbacks)):
            return
        self._begun = []
        if problem := _obstacle(fit) or why_not_read_again(fit):
            raise ValueError(f'`on_loss="continue"` {problem}')
        self._num_fits += 1
        extended = fit.strategy.extended
        extended.add_facts(
            {
                "number of the call of `fit`": str(self._num_fits),
                "model, data, callbacks or arguments of `fit`": _digest(fit),
            }
        )
        if extended.is_applicant:
            fit.arguments["callbacks"] = [
                c for c in callback_list(callbacks) if not is_of_user(c)
            ]

    def recover(
        self,
        name: str,
        model: Any,
        arguments: dict[str, Any],
        error: Exception,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Form a new cluster of the workers that are left, if one was lost."""
        strategy = strategy_of(model)
        if not isinstance(error, ClusterChanges) or not _continues(strategy):
            return False
        # The `fit` whose callback runs this loop recovers.
        if loops.current() is not None:
            return False
        if name != "fit" and not _can_begin_again(model, arguments.get("x")):
            return False
        extended = strategy.extended
        own, before = extended.worker_group.rank, extended.worker_group.num_workers
        if isinstance(error, WorkerLost) and error.rank == own:
            return False  # the others have given this worker up
        begin = time.monotonic()
        error = _change_cluster(strategy, error)
        _renew_optimizers(model)
        restart_data(arguments)
        if name == "fit":
            begun = {id(reference()) for reference in self._begun}
            continue_callbacks(arguments.get("callbacks"), stack, begun)
        group = extended.worker_group
        if group.is_chief:
            what, _, _ = str(error).partition(" The other workers cannot")
            goes_on = (
                "Training continues" if name == "fit" else f"`{name}` begins again"
            )
            print(
                f"tfdp: {what} {goes_on} with "
                f"{pluralize(group.num_workers, 'worker')} instead of {before}, after "
                f"{time.monotonic() - begin:.1f} s.",
                file=sys.stderr,
                flush=True,
            )
        return True

    def after_fit(self, fit: Fit) -> None:
        """Remember which callbacks have begun, those that ran on this worker."""
        callbacks = fit.arguments.get("callbacks")
        backups = backup_callbacks(callbacks)
        # Those that save are called last.
        if _continues(fit.strategy) and any(backup.has_begun for backup in backups):
            self._begun += map(weakref.ref, other_callbacks(callbacks))


def _change_cluster(strategy: Any, change: ClusterChanges) -> ClusterChanges:
    """Form a new cluster, and another one for as long as more workers are lost.

    Args:
        strategy: The strategy.
        change: The first change.

    Returns:
        The last one.
    """
    while True:
        try:
            strategy.extended.change_cluster(change)
            random_seed.agree_on_seed(strategy)
            return change
        except ClusterChanges as further:
            change = further


def _continues(strategy: Any) -> bool:
    """Return whether training continues after a loss, with a strategy or `None`."""
    return strategy is not None and strategy.extended.continues_after_loss


def _obstacle(fit: Fit) -> str:
    """Return why `fit` could not continue after a loss, or `""`."""
    callbacks = callback_list(fit.arguments.get("callbacks"))
    if not backup_callbacks(callbacks):
        return (
            "continues from the state that a callback saves: pass "
            "`tfdp.callbacks.BackupAndRestore(directory, memory_every=1)` to `fit`."
        )
    for name in ("x", "validation_data"):
        data = fit.arguments.get(name)
        if _is_divided(data):
            return (
                "divides the data anew after a loss: pass the same dataset on all "
                "workers, not one that is distributed, from `shard_files`, or with "
                f"`AutoShardPolicy.OFF` or `FILE`. Received: {name}={data!r}"
            )
    for callback in callbacks:
        options = getattr(callback, "options", None)
        if getattr(options, "shards_parameters", False) or hasattr(
            options, "sync_every"
        ):
            return (
                'is not for `sharding="parameters"`, `LocalSGD` and `DiLoCo`, whose '
                f"replicas have different weights. Received: {type(callback).__name__}"
            )
    sharding = getattr(fit.model.optimizer, "sharding", "none")
    parameters = map(sharded_parameter, fit.model.variables)
    if sharding == "parameters" or any(p is not None for p in parameters):
        return 'is not for `sharding="parameters"`, of which each replica has a part.'
    return ""


def _can_begin_again(model: Any, data: Any) -> bool:
    """Return whether `evaluate` or `predict` can run again with other workers.

    Without training, each replica that is left has all weights. It lacks the optimizer
    state that was sharded, for a later `fit`.

    Args:
        model: The Keras model.
        data: The first argument of the loop.
    """
    optimizers = [model.optimizer, *other_optimizers(model).values()]
    is_sharded = any(getattr(each, "is_sharded", False) for each in optimizers)
    return not is_sharded and not isinstance(data, Iterator) and not _is_divided(data)


def _is_divided(data: Any) -> bool:
    """Return whether each worker has its own part of a dataset."""
    if isinstance(data, tf.distribute.DistributedDataset):
        return True
    if not isinstance(data, tf.data.Dataset):
        return False
    policy = data.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    is_file = FileShard.of_divided_files(data) is not None
    return is_file or policy in (policies.OFF, policies.FILE)


def _digest(fit: Fit) -> str:
    """Return a digest of what a worker that joins must have in common."""
    callbacks = callback_list(fit.arguments.get("callbacks"))
    described = {
        "configs": configs.configs_of("fit", fit.model, callbacks, has_trained=True),
        "arguments": {name: fit.arguments.get(name) for name in _COMPARED},
        "directories": [c.directory for c in backup_callbacks(callbacks)],
        "data": [_described(fit.arguments.get(name)) for name in ("x", "y")],
    }
    text = json.dumps(configs.comparable(described), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(data: Any) -> str:
    """Describe data by what a worker that joins must have in common."""
    if isinstance(data, tf.data.Dataset):
        return f"{data.element_spec} {_compat.shuffle_seeds(data)}"
    return f"{type(data).__name__} {getattr(data, 'shape', '')}"


def _renew_optimizers(model: Any) -> None:
    """Let go of what a model's optimizers have of the former replicas.

    Optimizers whose shards are those of the former replicas are replaced: the new ones
    have no state until the newest backup is loaded. A replica then builds its shards
    from its weights, which must be equal on all.

    Args:
        model: The Keras model.
    """
    strategy = model.distribute_strategy
    optimizers = {"optimizer": model.optimizer, **other_optimizers(model)}
    for name, optimizer in optimizers.items():
        if not isinstance(optimizer, DistributedOptimizer):
            continue
        optimizer.forget_traces()
        if optimizer.sharding == "none":
            continue
        with strategy.scope():
            setattr(model, name, optimizer.renewed())
        for variable in model.weights:
            value = _compat.value_of(variable)
            value.assigned = None
            strategy.extended.new_variables.add(value)


register(Elastic())
