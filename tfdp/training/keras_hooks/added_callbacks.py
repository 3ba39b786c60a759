"""Callbacks that tfdp adds to Keras's loops, to keep the workers in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.ground._compat import keras_model, tf_distribute
from tfdp.ground.base.feature import batches_between_syncs, equalize_replicas
from tfdp.ground.base.wrappers import other_optimizers, rate_variables
from tfdp.training.replicas.synchronized_scope import broadcast_variables

# The number of batches between checks for overflows: a check reads a variable, and so
# waits for the running step.
_BATCHES_BETWEEN_CHECKS = 10


class TensorBoardParticipant(keras.callbacks.Callback):
    """Callback of workers other than 0, for the saves of worker 0's `TensorBoard`.

    A save of weights with sharded state needs all workers; only worker 0 writes a file.

    Args:
        every: Int, number of epochs between saves.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take part in the save of weights after this epoch, if worker 0 saves them."""
        if epoch % self._every == 0:
            # A save of sharded state gathers values from all workers, but only worker 0
            # writes a file. So the path on this worker is a placeholder.
            self.model.save_weights("taking-part.weights.h5")


class SyncStopTraining(keras.callbacks.Callback):
    """Stop all workers at the end of an epoch in which any worker requested a stop.

    In the same message, workers compare the learning rates that callbacks may have set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stop_requested = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree with all workers on whether training stops after this epoch.

        Raises:
            ValueError: On every worker, if learning rates differ.
        """
        rates = [float(variable.numpy()) for variable in rate_variables(self.model)]
        self._synchronize([float(f"{rate:.6g}") for rate in rates])

    def _synchronize(self, rates: Sequence[float] = ()) -> None:
        """Set `model.stop_training` on all workers if any worker requested a stop.

        Args:
            rates: Sequence of floats, learning rates to compare. Defaults to none.

        Raises:
            ValueError: On every worker, if `rates` differ between workers.
        """
        worker_group = worker_group_of(self.model)
        stop = self._stop_requested or bool(self.model.stop_training)
        gathered = worker_group.all_gather("stop_training", [stop, *rates])
        self.model.stop_training = any(each[0] for each in gathered)
        self._stop_requested = False
        by_worker = [each[1:] for each in gathered]
        if not np.allclose(by_worker, by_worker[0], rtol=1e-3, atol=0, equal_nan=True):
            raise ValueError(
                "Workers have set different learning rates within `fit`. Give every "
                "worker the callbacks that set the learning rate, and let them set the "
                f"same value. Received: {by_worker}, by worker"
            )


class SyncStopTrainingEachBatch(SyncStopTraining):
    """Stop all workers after the batch in which any worker requested a stop.

    Workers that do not synchronize in every step stop at their next synchronization.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the batches of a new epoch."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Agree on a stop with all workers, if they synchronize after this batch.

        Otherwise a request is kept until the next synchronization.
        """
        before, self._last_batch = self._last_batch, batch
        every = batches_between_syncs(self.model)
        if every is not None and (batch + 1) // every > (before + 1) // every:
            self._synchronize()
        else:
            self._stop_requested |= bool(self.model.stop_training)
            self.model.stop_training = False


class BroadcastRestoredState(keras.callbacks.Callback):
    """Broadcast the state that worker 0's `BackupAndRestore` has restored."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Set the initial epoch and all replicated variables to those of worker 0."""
        worker_group = worker_group_of(self.model)
        local_epoch = keras_model.initial_epoch(self.model)
        epoch = worker_group.all_gather("a backup", local_epoch)[0]
        keras_model.set_initial_epoch(self.model, epoch)
        optimizer: Any = self.model.optimizer
        variables = self.model.variables + optimizer.variables
        for other in other_optimizers(self.model).values():
            variables = variables + other.variables
        per_replica_ids = {
            id(v) for v in getattr(optimizer, "per_replica_variables", [])
        }
        variables = [v for v in variables if id(v) not in per_replica_ids]
        values_by_id = {id(v.value): v.value for v in variables if _is_replicated(v)}
        broadcast_variables(self.model.distribute_strategy, list(values_by_id.values()))


class OptimizerProgressCheck(keras.callbacks.Callback):
    """Stop `fit` if gradients always overflow, and equalize replicas after each epoch.

    The optimizer's `check_progress` raises after ten overflows in a row at the smallest
    loss scale. At the end of an epoch, all replicas get the same state, and equal parts
    of the accumulated gradients, so that any worker can save them.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Check after every tenth batch; raise if all of the last steps overflow."""
        if batch % _BATCHES_BETWEEN_CHECKS == _BATCHES_BETWEEN_CHECKS - 1:
            self._check()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check for overflowing gradients, and equalize replicas for a save.

        If replicas update independently, their weights and slots are averaged. If
        several workers accumulate gradients, each replica gets an equal part of the
        sum, since a save computes the sum from local replicas alone.

        Raises:
            RuntimeError: After ten overflows in a row at the smallest loss scale.
        """
        self._check()
        equalize_replicas(self.model)
        # A save computes the sum of accumulated gradients from local replicas alone.
        # With several workers, all replicas first get equal parts of the sum.
        optimizer: Any = self.model.optimizer
        has_several_workers = worker_group_of(self.model).num_workers > 1
        if has_several_workers and getattr(optimizer, "accumulated_steps", False):
            optimizer.redistribute_accumulated()

    def _check(self) -> None:
        """Call the optimizer's `check_progress`, which raises if all steps overflow."""
        if hasattr(self.model.optimizer, "check_progress"):
            self.model.optimizer.check_progress()


def _is_replicated(variable: Any) -> bool:
    """Return whether each replica has a full copy of a Keras variable."""
    value = variable.value
    # A variable that has parts is not replicated: each replica holds a part of its
    # elements, and each worker restores its own parts.
    has_parts = getattr(value, "has_parts", False)
    return isinstance(value, tf_distribute.MirroredVariable) and not has_parts
