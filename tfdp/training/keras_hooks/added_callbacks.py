"""Callbacks that tfdp adds to Keras's loops, to keep the workers in step."""

from __future__ import annotations

from typing import Any

import keras

from tfdp.ground import _compat
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.base.feature import batches_between_meetings, equalize_replicas
from tfdp.ground.base.wrappers import other_optimizers
from tfdp.training.replicas.synchronized_scope import broadcast_variables

# Looking at a variable waits for the step that is under way.
_CHECK_EVERY = 10


class TensorBoardParticipant(keras.callbacks.Callback):
    """Take part when the first worker's `TensorBoard` saves weights for embeddings.

    Args:
        every: Int, epochs between.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch % self._every == 0:
            # Only the first worker writes where state is sharded.
            self.model.save_weights("taking-part.weights.h5")


class SyncStopTraining(keras.callbacks.Callback):
    """Stop all workers when one of them decides to, at the end of an epoch.

    Args:
        strategy: A tfdp strategy.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy
        self._is_wanted = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._synchronize()

    def _synchronize(self) -> None:
        worker_group = self._strategy.extended.worker_group
        stop = self._is_wanted or bool(self.model.stop_training)
        self.model.stop_training = worker_group.any("stop_training", stop)
        self._is_wanted = False


class SyncStopTrainingEachBatch(SyncStopTraining):
    """Stop all workers after any batch, where callbacks of the user's may decide.

    Where replicas train alone, at the next batch after which they meet anyway.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._last_batch = self._last_batch, batch
        every = batches_between_meetings(self.model)
        if every is not None and (batch + 1) // every > (before + 1) // every:
            self._synchronize()
        else:
            self._is_wanted |= bool(self.model.stop_training)
            self.model.stop_training = False


class BroadcastRestoredState(keras.callbacks.Callback):
    """Broadcast what the first worker restored from its backup.

    Args:
        strategy: A tfdp strategy.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        worker_group = self._strategy.extended.worker_group
        own = _compat.initial_epoch(self.model)
        epoch = worker_group.all_gather("a backup", own)[0]
        _compat.set_initial_epoch(self.model, epoch)
        optimizer: Any = self.model.optimizer
        variables = self.model.variables + optimizer.variables
        for other in other_optimizers(self.model).values():
            variables = variables + other.variables
        theirs = {id(v) for v in getattr(optimizer, "own_by_replica", [])}
        variables = [v for v in variables if id(v) not in theirs]
        seen = {id(v.value): v.value for v in variables if _is_replicated(v)}
        broadcast_variables(self._strategy, list(seen.values()))


class OptimizerProgressCheck(keras.callbacks.Callback):
    """Stop training that makes no progress; prepare an optimizer's state for files."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % _CHECK_EVERY == _CHECK_EVERY - 1:
            self._check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._check()
        equalize_replicas(self.model)
        strategy = self.model.distribute_strategy
        # The parts of one process are added up when they are written.
        several = is_tfdp(strategy) and strategy.extended.worker_group.num_workers > 1
        if several and getattr(self.model.optimizer, "accumulated_steps", 0):
            self.model.optimizer.redistribute_accumulated()

    def _check(self) -> None:
        if hasattr(self.model.optimizer, "check_progress"):
            self.model.optimizer.check_progress()


def _is_replicated(variable: Any) -> bool:
    value = variable.value
    has_parts = getattr(value, "has_parts", False)  # what each worker has restored
    return isinstance(value, _compat.MirroredVariable) and not has_parts
