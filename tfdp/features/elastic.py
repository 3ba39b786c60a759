"""Training that continues after the loss of workers: `on_loss="continue"`.

The remaining workers form a new cluster within `fit`, and run it again from the newest
state that `BackupAndRestore` has saved. To the user's callbacks it is one call. A
process that joins a running job begins `fit` alone, without the user's callbacks, until
everything is built; then it runs `fit` again with the others. Custom training loops
continue by `tfdp.features.elastic_state`.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.facts import digest
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.watch import ClusterChanges, WorkerLost
from tfdp.features.attempts import (
    continue_callbacks,
    is_user_callback,
    restart_data,
    why_not_read_again,
)
from tfdp.ground._compat import keras_optimizer, tensor_reads, tf_data
from tfdp.ground.base import loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.ground.base.wrappers import is_sharded, other_optimizers
from tfdp.ground.text import pluralize, say
from tfdp.training.data.file_shards import FileShard
from tfdp.training.keras_hooks import configs
from tfdp.training.keras_hooks.worker_callbacks import (
    backup_callbacks,
    callback_list,
    other_callbacks,
)
from tfdp.training.optimizer.distributed import DistributedOptimizer
from tfdp.training.parameters.conversion import discard_values, parameters_in_order
from tfdp.training.parameters.sharded_parameter import sharded_parameter
from tfdp.training.replicas import random_seed

# A worker that joins must call `fit` with the same values of these arguments: otherwise
# workers would make different steps and validations.
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
    """Feature of `on_loss="continue"`: repeats a loop with the remaining workers.

    The loop is the call of `fit`, `evaluate` or `predict` that the loss of a worker has
    ended.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        # Whether the `with` block of an `ElasticState` runs. A Keras loop inside the
        # block does not recover from a loss of workers, since the block does.
        self.is_in_loop = False
        # Callbacks of the user whose `on_train_begin` has run in the present `fit`: it
        # must not run again in a further attempt on this worker.
        self._begun: list[weakref.ref[Any]] = []
        # Models whose sharded parameters were discarded at a change of the workers.
        # These are zeros until a state is loaded: training must not begin from them.
        self.discarded: weakref.WeakSet[Any] = weakref.WeakSet()

    def choose_callbacks(self, fit: Fit) -> None:
        """Check that `fit` can continue after a loss; record what joining workers need.

        A joining worker needs the same model, data, callbacks and arguments of `fit`.
        On a worker that joins itself, callbacks that are not tfdp's are removed from
        the arguments of `fit`. Nothing is done without `on_loss="continue"`, within
        another loop, or if `fit` is repeated after a loss.

        Raises:
            ValueError: If `fit` cannot continue after a loss.
        """
        if not continues(fit.strategy) or loops.current() is not None:
            return
        callbacks = fit.arguments.get("callbacks")
        if any(callback.is_retry for callback in backup_callbacks(callbacks)):
            return
        self._begun = []
        if self.is_in_loop:
            raise ValueError(
                "`fit` continues by itself after a loss: call it outside of the `with` "
                "block of an `ElasticState`."
            )
        if problem := _why_not_recoverable(fit) or why_not_read_again(fit):
            raise ValueError(f'`on_loss="continue"` {problem}')
        self.add_call(
            fit.strategy,
            {"model, data, callbacks or arguments of `fit`": _digest(fit)},
        )
        if fit.strategy.extended.is_applicant:
            fit.arguments["callbacks"] = [
                c for c in callback_list(callbacks) if not is_user_callback(c)
            ]

    def add_call(self, strategy: Any, facts: dict[str, str]) -> None:
        """Count a call of `fit` or `ElasticState`; record what a joining worker needs.

        A worker can join only if it has recorded the same facts. The number of the call
        is one of them: a worker joins in its own call of that number.

        Args:
            strategy: The strategy.
            facts: Dict from a description, for messages, to a digest or another string.
        """
        self._num_calls += 1
        number = {"number of the call of `fit` or `ElasticState`": str(self._num_calls)}
        strategy.extended.add_facts(number | facts)

    def recover(
        self,
        name: str,
        model: Any,
        arguments: dict[str, Any],
        error: Exception,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Form a new cluster of the remaining workers, if one was lost.

        Implements `Feature.recover`.

        Args:
            name: String, the loop: `"fit"`, `"evaluate"` or `"predict"`.
            model: The Keras model.
            arguments: Dict, the arguments of the loop by name; data and callbacks in it
                are prepared for the next attempt.
            error: The error that the loop has raised.
            stack: `contextlib.ExitStack`, closed at the end of the call; it then
                restores what was changed in the callbacks.

        Returns:
            Bool, whether the loop is repeated: `False` without `on_loss="continue"`, if
            the error is not a `ClusterChanges`, if the others have declared this worker
            lost, if the loop cannot begin again, or if an enclosing loop recovers.
        """
        strategy = strategy_of(model)
        if not isinstance(error, ClusterChanges) or not continues(strategy):
            return False
        # Only the outermost loop recovers, since it is repeated as a whole: a `fit`
        # whose callback runs this loop, or the `with` block of an `ElasticState`.
        if loops.current() is not None or self.is_in_loop:
            return False
        if name != "fit" and not _can_begin_again(model, arguments.get("x")):
            return False
        if is_declared_lost(strategy, error):
            return False
        continuation = (
            "Training continues" if name == "fit" else f"`{name}` begins again"
        )
        change_cluster(model, error, continuation)
        restart_data(arguments)
        if name == "fit":
            begun = {id(reference()) for reference in self._begun}
            continue_callbacks(arguments.get("callbacks"), stack, begun)
        return True

    def after_fit(self, fit: Fit) -> None:
        """Remember the user's callbacks that have begun, which `recover` lets continue.

        In the next attempt of this `fit` on this worker they do not begin a second
        time.
        """
        callbacks = fit.arguments.get("callbacks")
        backups = backup_callbacks(callbacks)
        # Backup callbacks are called last: once one of them has begun, all of the
        # user's callbacks have begun.
        if continues(fit.strategy) and any(backup.has_begun for backup in backups):
            self._begun += map(weakref.ref, other_callbacks(callbacks))


def is_declared_lost(strategy: Any, change: ClusterChanges) -> bool:
    """Return whether this worker is the one that the others have declared lost."""
    own = strategy.extended.worker_group.rank
    return isinstance(change, WorkerLost) and change.rank == own


def change_cluster(model: Any, change: ClusterChanges, continuation: str) -> str:
    """Form a new cluster of the remaining workers, again if more of them are lost.

    The state of the model must be loaded afterwards.

    Args:
        model: The Keras model.
        change: `ClusterChanges`, the error that reported the first change.
        continuation: String, what continues, such as `"Training continues"`.

    Returns:
        String, what has changed, in sentences. The first worker has also printed it.

    Raises:
        WorkerLost: If the others have declared this worker lost meanwhile.
    """
    strategy, begin = model.distribute_strategy, time.monotonic()
    before = worker_group_of(model).num_workers
    trained = {
        name: keras_optimizer.trained_by(optimizer)
        for name, optimizer in _optimizers(model).items()
    }
    while True:
        try:
            strategy.extended.change_cluster(change)
            random_seed.agree_on_seed(strategy)
            _renew_optimizers(model, trained)
            break
        except ClusterChanges as further:
            if is_declared_lost(strategy, further):
                raise
            change = further
    what, _, _ = str(change).partition(" The other workers cannot")
    group = worker_group_of(model)
    # A worker may have joined in the place of the lost one. The former number of
    # workers is then the same, and is left out of the message.
    former = f" instead of {before}" if before != group.num_workers else ""
    text = (
        f"{what} {continuation} with {pluralize(group.num_workers, 'worker')}{former}, "
        f"after {time.monotonic() - begin:.1f} s."
    )
    if group.is_chief:
        say(text)
    return text


def continues(strategy: Any) -> bool:
    """Return whether training with a strategy continues after the loss of workers."""
    return strategy is not None and strategy.extended.continues_after_loss


def _why_not_recoverable(fit: Fit) -> str:
    """Return why `fit` could not continue after the loss of a worker, or `""`."""
    callbacks = callback_list(fit.arguments.get("callbacks"))
    if not backup_callbacks(callbacks):
        return (
            "continues from the state that a callback saves: pass "
            "`tfdp.callbacks.BackupAndRestore(directory, memory_every=20)` to `fit`."
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
        if hasattr(getattr(callback, "options", None), "sync_every"):
            return (
                "is not for `LocalSGD` and `DiLoCo`, whose replicas have different "
                f"weights. Received: {type(callback).__name__}"
            )
    return ""


def _can_begin_again(model: Any, data: Any) -> bool:
    """Return whether `evaluate` or `predict` can run again with other workers.

    Without training, each remaining replica has all weights. It lacks the sharded
    optimizer state of lost replicas, for a later `fit`.

    Args:
        model: The Keras model.
        data: The first argument of the loop.

    Returns:
        Bool, `False` if an optimizer is sharded, or if the data are an iterator or
        divided among the workers.
    """
    optimizers = [model.optimizer, *other_optimizers(model).values()]
    has_shards = any(map(is_sharded, optimizers))
    return not (has_shards or isinstance(data, Iterator) or _is_divided(data))


def _is_divided(data: Any) -> bool:
    """Return whether each worker already has its own part of a dataset."""
    if isinstance(data, tf.distribute.DistributedDataset):
        return True
    if not isinstance(data, tf.data.Dataset):
        return False
    policy = data.options().experimental_distribute.auto_shard_policy
    policies = tf.data.experimental.AutoShardPolicy
    is_file = FileShard.of_divided_files(data) is not None
    return is_file or policy in (policies.OFF, policies.FILE)


def _digest(fit: Fit) -> str:
    """Return a digest of what a joining worker must have in common with others.

    These are the configs of the model and the callbacks, arguments of `fit`, the
    directories of backups, and the kind and shapes of the data.
    """
    callbacks = callback_list(fit.arguments.get("callbacks"))
    described = {
        "configs": configs.configs_of("fit", fit.model, callbacks, has_trained=True),
        "arguments": {name: fit.arguments.get(name) for name in _COMPARED},
        "directories": [c.directory for c in backup_callbacks(callbacks)],
        "data": [_described(fit.arguments.get(name)) for name in ("x", "y")],
    }
    return digest(configs.comparable(described))[:16]


def _described(data: Any) -> str:
    """Describe the properties of a `fit`'s data that all workers must share.

    Args:
        data: The argument `x` or `y` of `fit`.

    Returns:
        String: for a `tf.data.Dataset` the specs of its elements and the seeds of its
        shuffles; for other data its class, and its shape if it has one.
    """
    if isinstance(data, tf.data.Dataset):
        return f"{data.element_spec} {tf_data.shuffle_seeds(data)}"
    return f"{type(data).__name__} {getattr(data, 'shape', '')}"


def _optimizers(model: Any) -> dict[str, DistributedOptimizer]:
    """Return a model's `DistributedOptimizer`s by the names of their attributes."""
    every = {"optimizer": model.optimizer, **other_optimizers(model)}
    return {
        n: each for n, each in every.items() if isinstance(each, DistributedOptimizer)
    }


def _renew_optimizers(model: Any, trained: dict[str, list[Any]]) -> None:
    """Replace a model's sharded optimizers by new ones for the present replicas.

    The new ones have no state until the newest backup is loaded, and sharded weights
    are divided anew. All optimizers drop their traced functions; those that are not
    sharded are kept.

    Args:
        model: The Keras model.
        trained: Dict from the name of each optimizer to the variables that it trained
            before the change; empty if it was not built.

    Raises:
        ClusterChanges: If another worker is lost meanwhile.
    """
    strategy, divides = model.distribute_strategy, []
    for name, variables in trained.items():
        optimizer = getattr(model, name)
        optimizer.forget_traces()
        if not optimizer.sharding_options.shards_state:
            continue
        with strategy.scope():
            renewed = optimizer.renew()
            setattr(model, name, renewed)
        # Only an optimizer that was built has divided its parameters, which then must
        # be divided anew among the remaining replicas.
        if variables and renewed.sharding_options.shards_parameters:
            renewed.register_model(model)
            divides.append((renewed, variables))
    wanted = any(getattr(model, name).sharding_options.shards_state for name in trained)
    if wanted or any(map(sharded_parameter, model.weights)):
        _renew_weights(model, divides)


def _renew_weights(
    model: Any, divides: list[tuple[DistributedOptimizer, list[Any]]]
) -> None:
    """Divide sharded weights anew; mark the others to be broadcast from worker 0.

    Sharded weights are zeros until a state is loaded. The others count as new
    variables, whose values the strategy later broadcasts.

    Args:
        model: The Keras model.
        divides: List of pairs: a new optimizer that shards parameters, and the list of
            the Keras variables that it trains.

    Raises:
        RuntimeError: If parameters were sharded before they had an optimizer.
    """
    strategy, sharded = model.distribute_strategy, dict[int, Any]()
    for _, trained in divides:
        # `trained` is added, since a custom training loop may train variables other
        # than the weights of layers, which are all that `parameters_in_order` returns.
        every = [*parameters_in_order(model, trained), *trained]
        sharded |= {id(variable): variable for variable in every}
    for variable in model.weights:
        if id(variable) in sharded:
            continue
        value = tensor_reads.value_of(variable)
        if sharded_parameter(variable) is not None:
            raise RuntimeError(
                "A worker was lost before the first state of the model was saved, and "
                "with it its part of the initial weights. Start the job again."
            )
        value.assigned = None
        strategy.extended.new_variables.add(value)
    if sharded:
        FEATURE.discarded.add(model)
    discard_values(list(sharded.values()), strategy)
    # The optimizers are built now, not in the next step: building divides the
    # parameters among the replicas, and until then a worker that joins has whole ones,
    # unlike the other workers.
    for optimizer, trained in divides:
        with strategy.scope():
            optimizer.build(trained)


FEATURE = Elastic()
register(FEATURE)
