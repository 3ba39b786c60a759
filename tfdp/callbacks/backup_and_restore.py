"""Backups of training, and exact resumption after an interruption."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from typing import Any

import keras

from tfdp.callbacks.bases import StrategyCallback
from tfdp.callbacks.resumed_batches import ResumedBatches
from tfdp.callbacks.resumption import Resumption
from tfdp.callbacks.run_state import RunState
from tfdp.checkpoint import api
from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.host_memory import HostMemory
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.checkpoint.model_state import saved_variables
from tfdp.checkpoint.newest_state import BackupTarget, find_newest
from tfdp.checkpoint.object_store import absolute_path
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.preemption import PreemptionNotice, PreemptionWatch
from tfdp.communication.coordination.watch import WorkerLost, WorkersJoin
from tfdp.features import elastic
from tfdp.features.islands.island import Island
from tfdp.features.local_steps import FEATURE as LOCAL_STEPS
from tfdp.ground import user_code
from tfdp.ground._compat import keras_model, tf_data, tf_distribute
from tfdp.ground.arguments import (
    check_choice,
    checked_bool,
    checked_integer,
    checked_path,
    is_integer,
    plain,
)
from tfdp.ground.base import activities, loops
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.feature import equalize_replicas
from tfdp.ground.text import say
from tfdp.training.data.position import DataPosition
from tfdp.training.program.step import unsaved_writes


class BackupAndRestore(StrategyCallback):
    """Back up training regularly, and resume it exactly when the script runs again.

    A run that was interrupted at any moment ends with the same weights and history as
    an uninterrupted run: bit for bit on the same number of replicas (if the operations
    are deterministic), and as on one device on any other number. Each worker writes its
    own part into one shared directory. Call `fit` with the same arguments.

    A backup holds the weights; the optimizer's state, sharded or not; the loss scale;
    accumulated gradients; the metrics of the epoch so far; random states; the position
    in the data; and the state of callbacks: those of Keras, and any that has the
    methods `get_state()`, which returns JSON-serializable data, and `set_state(state)`.

    On SIGTERM, which cluster managers send before they reclaim a machine, all workers
    save at the end of a step, within about a second, and exit with code 75.

    Args:
        directory: String or path-like, a separate directory for each `fit` of a script,
            created if missing; or the URL of an object store, such as
            `"s3://bucket/run"` (`pip install tfdp[fsspec] s3fs`).
        save_freq: `"epoch"`, or an int, batches between two backups. Defaults to
            `"epoch"`.
        keep: Int, how many backups are kept. Defaults to 3.
        delete_at_end: Bool, whether the backups are deleted when `fit` finishes, as
            Keras does, so that the script starts from scratch when it runs again. With
            `False` it continues after the last epoch. Defaults to `True`.
        batch: String, what stays the same on another number of replicas. `"global"`:
            the global batch, and so the result of training. `"per_replica"`: the batch
            of each replica; the script passes that size times the number of replicas,
            the learning rate is multiplied by the same ratio, and the position in the
            data is rounded down to a whole batch, so some samples are seen twice.
            Defaults to `"global"`.
        background: Bool, whether training continues while a backup is written: a save
            stops it for a copy of each worker's part of the state in memory. A save
            waits for the previous one, and raises its error; `fit` returns once the
            last one is complete. Defaults to `True`.
        memory_every: Int, batches between two saves in memory, in addition to those in
            the directory: each worker's part stays in the memory of its host, with a
            copy on the next host. A run that starts again after its processes were lost
            reads no backup from the disk. These saves take four times the size of a
            part, or twice on a single host. Defaults to `None`, no saves in memory.

    Raises:
        ValueError: If an argument is invalid; on every worker, in `fit`, if the
            directory has backups of another model or run, or no intact backup.
        OSError: On every worker, in `fit`, if a worker cannot write, or an object
            store does not answer.

    Example:

    >>> import tempfile
    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> x, y = np.ones((8, 2)), np.ones((8, 1))
    >>> folder = tempfile.mkdtemp()
    >>> backup = BackupAndRestore(folder, save_freq=2, delete_at_end=False)
    >>> _ = model.fit(x, y, batch_size=2, callbacks=[backup], verbose=0)
    >>> sorted(os.listdir(folder))
    ['step-2', 'step-4']
    """

    # A callback with this attribute saves the state of the other callbacks, so `fit`
    # calls it last, and passes the others to it.
    resumes_fit = True

    # All workers save and load together, so `fit` raises an error if these settings
    # differ between workers.
    compared = (
        "save_freq",
        "keep",
        "delete_at_end",
        "batch",
        "background",
        "memory_every",
    )

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        keep: int = 3,
        *,
        delete_at_end: bool = True,
        batch: str = "global",
        background: bool = True,
        memory_every: int | None = None,
    ) -> None:
        super().__init__()
        what = "the path of a directory, or a URL"
        self.directory = checked_path("directory", directory, what)
        _check_arguments(save_freq, batch)
        self.save_freq = plain(save_freq)
        self.keep = checked_integer("keep", keep, 1)
        self.delete_at_end = checked_bool("delete_at_end", delete_at_end)
        self.batch = batch
        self.background = checked_bool("background", background)
        if memory_every is not None:
            memory_every = checked_integer("memory_every", memory_every, 1)
        self.memory_every = memory_every
        self._others: list[Any] = []
        # A backup from within an epoch is pending until `fit` begins that epoch, since
        # Keras then resets the metrics that the backup restores.
        self._pending: Resumption | None = None
        # `is_retry` is true in later attempts of `fit` within one call of the user. If
        # an attempt has saved or loaded a state, `_has_state` is true, and later
        # attempts must find a state, since the weights may be those of an interrupted
        # step.
        self.is_retry = self._has_state = False
        # `has_begun` is true once `on_train_begin` has run in this attempt of `fit`:
        # the other callbacks have then begun too, since `fit` calls this callback last.
        self.has_begun = False

    def listen(self, position: DataPosition) -> None:
        """Record the signals of a preemption notice from now until the end of `fit`.

        Called before `fit` begins. The callback acts on a recorded notice after a step.

        Args:
            position: `DataPosition`; closing its `exit_stack` at the end of `fit`
                restores the previous signal handlers.
        """
        self.has_begun = False
        self._notice = PreemptionNotice()
        self._notice.listen()
        position.exit_stack.callback(self._notice.stop)

    def set_position_and_callbacks(
        self, position: DataPosition, others: list[Any]
    ) -> None:
        """Store the position in the data, and the other callbacks, to be backed up."""
        self._position = position
        self._others = others

    # The hooks of this callback run after those of all other callbacks, so that a
    # backup contains what the others have changed.

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the newest backup, and load it now or when its unfinished epoch begins.

        Raises:
            WorkersJoin: On a worker that joins a running job: all workers then begin
                `fit` again.
            RuntimeError: If `fit` must go back to a backup, and no worker finds one.
        """
        self._worker_group = worker_group_of(self.model)
        self._backups = Backups(
            self._folder(),
            self.keep,
            self._worker_group,
            functools.partial(api.serialize_model, self.model),
            background=self.background,
            has_memory=self.memory_every is not None,
        )
        self._position.exit_stack.callback(self._backups.release)
        self._position.exit_stack.callback(self._backups.close)
        self._state = RunState(
            self.model,
            self._position,
            ResumedBatches(self.model, self._position, self.batch),
            self._others,
            self._worker_group,
        )
        self.has_begun = True
        is_empty = self.model in elastic.FEATURE.discarded
        self._has_state = must_resume = self.is_retry and (self._has_state or is_empty)
        strategy = strategy_of(self.model)
        if strategy is not None and strategy.extended.is_applicant:
            # A worker that joins a running job begins `fit` again together with the
            # other workers. Those have already reset their metrics, so this worker
            # resets its own.
            self.model.reset_metrics()
            raise WorkersJoin
        self._watch = PreemptionWatch(
            self._notice,
            self._worker_group,
            list if strategy is None else strategy.extended.applicants,
        )
        self._epoch, self._last_batch, self._total = 0, -1, 0
        self._has_compared = False
        self._count_start = 0
        self._pending = None
        self._build_model()
        self._memory = self._new_memory()
        newest = find_newest(
            self._backups,
            self._memory,
            self._state.plan_load,
            is_end_of_epoch=self.save_freq == "epoch",
        )
        if newest is not None:
            self._resume(Resumption(self._state, *newest))
            return
        if must_resume:
            raise RuntimeError(
                "No worker has found a state from which to continue. Start the job "
                "again."
            )
        goes_back = bool(self._recovery_option())
        if goes_back or self.save_freq != "epoch" or self.memory_every is not None:
            self._warn_about_position(self._position.nondeterminism)
        if goes_back:
            # A lost worker or a rollback may require a backup from step 1 on, before
            # any file has the initial weights.
            self._save_for_recovery(0, 0, {})
            self._has_state = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Load the backup that `on_train_begin` deferred to this epoch, if any."""
        self._epoch, self._last_batch = epoch, -1
        self._position.last_logs = None
        self._begin = self._position.snapshot()
        if self._pending is not None:
            self._begin, batches = self._pending.begin_epoch()
            self._last_batch, self._pending = batches - 1, None
        self._restart_count(self._last_batch + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if a backup is due; exit on a preemption notice; admit new workers.

        For new workers that ask to join, all workers save, and raise `WorkersJoin`.
        """
        before, last_batch = self._total, self._last_batch
        self._total += batch - last_batch
        self._last_batch = batch
        # An all-gather of preemption notices synchronizes the workers. With local
        # steps, they all-gather only at exchanges, so that they can run apart in
        # between. With `backup_workers`, steps do not wait for late workers, so they
        # all-gather only after each epoch.
        ask_every = loops.exchange() is None and LOCAL_STEPS.batches_between_syncs(
            self.model, is_delayed=False
        )
        count = batch + 1 - self._count_start
        count_before = last_batch + 1 - self._count_start
        asks = ask_every and count // ask_every > count_before // ask_every
        is_notified = asks and self._watch.any_worker_notified(self._total)
        if self.model.stop_training:
            # Nothing is saved after a batch that has stopped training: a run that
            # resumed there would train the rest of the epoch. A preemption notice is
            # handled at the end of the epoch.
            return
        if is_notified:
            self._save_and_exit(self._epoch, batch + 1, logs)
            return
        if asks and self._watch.joining:
            self._save_for_recovery(self._epoch, batch + 1, logs)
            raise WorkersJoin(self._watch.joining)
        every = self.save_freq
        places: list[BackupTarget] = []
        # A save gives all replicas the same state, as an exchange of local steps does.
        # So with local steps, a save in memory waits for an exchange, to cause no
        # further synchronization.
        waits = asks or loops.exchange() is not None
        if waits and self._memory is not None and self._memory.is_due(self._total):
            places.append(self._memory)
        if isinstance(every, int) and self._total // every > before // every:
            places.append(self._backups)
        if places:
            self._save(self._epoch, batch + 1, logs, places)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if a backup is due; save and exit on a preemption notice."""
        is_preempted = self._watch.any_worker_notified(self._total, must_gather=True)
        if is_preempted:
            self._save_and_exit(epoch + 1, 0, {})
            return
        places: list[BackupTarget] = []
        if self._memory is not None and self._memory.is_enabled:
            places.append(self._memory)
        if self.save_freq == "epoch":
            places.append(self._backups)
        if places:
            self._save(epoch + 1, 0, {}, places)

    def on_train_end(self, logs: Any = None) -> None:
        """Delete the backups, unless the user keeps them.

        They also stay on a preemption notice: the process may end before the script
        has saved the trained model.
        """
        continues = self._continues_after_loss()
        try:
            self._backups.finish()
        except WorkerLost as error:
            if not continues:
                raise
            # The error is printed and not raised: training is complete, `fit` returns,
            # and no later call would report it.
            say(f"the last save in the background is incomplete. {error}")
            return
        # With `on_loss="continue"`, the loss of a worker is ignored here, since the
        # training of all workers is complete.
        with contextlib.suppress(*[WorkerLost] * continues):
            self._delete()

    def _delete(self) -> None:
        """Delete saved states, unless a worker is preempted.

        These are the states in memory and, with `delete_at_end`, the backups in the
        directory. A worker is preempted if it has received a preemption notice.
        """
        is_preempted = self._watch.any_worker_notified(self._total, must_gather=True)
        if self._memory is not None and not is_preempted:
            self._memory.delete()
        if self.delete_at_end and not is_preempted:
            self._backups.delete()

    @activities.during(activities.BACKUP)
    def _save(
        self, epoch: int, batches: int, logs: Any, places: Sequence[BackupTarget]
    ) -> None:
        """Save the present state in the directory, in the memory of hosts, or in both.

        All workers call it. It first gives all replicas the same state.

        Args:
            epoch: Int, the epoch in which a resumed run continues.
            batches: Int, completed batches of that epoch.
            logs: Dict, the logs of the last batch.
            places: Sequence of the `Backups` and `MemoryBackups` that save it.
        """
        equalize_replicas(self.model)
        self._warn_about_unsaved()
        self._restart_count(batches)
        data = self._begin if batches else self._position.snapshot()
        tensors, run = self._state.collect(epoch, batches, self._total, logs, data)
        for place in places:
            place.save(self._total, tensors, run)

    def _warn_about_unsaved(self) -> None:
        """Warn once of a state that the step changes, and that no backup has."""
        strategy = strategy_of(self.model)
        if strategy is None or not self._total or self._has_compared:
            return  # before the first batch, the record may be of an earlier `compile`
        self._has_compared = True
        unsaved = unsaved_writes(strategy, self.model, saved_variables(self.model))
        if unsaved:
            user_code.warn(
                "`BackupAndRestore` does not save a state that the step of `fit` "
                "changes: a run that resumes begins with its initial value. Create a "
                "variable by the model's `add_weight`, and make each optimizer and "
                "metric an attribute of the model; other states cannot be saved. "
                f"Received: {unsaved[0]}",
                once_for=self.model,
                topic="unsaved state",
            )

    def _restart_count(self, batches: int) -> None:
        """Begin to count the batches to the next exchange of local steps.

        Local steps count the updates to the next exchange from the last time that all
        replicas were equalized: the end of an epoch, or a save. Micro-batches that were
        accumulated before belong to the first of these updates.

        Args:
            batches: Int, completed batches of this epoch.
        """
        accumulated = getattr(self.model.optimizer, "accumulated_steps", 0)
        self._count_start = batches - accumulated

    def _new_memory(self) -> MemoryBackups | None:
        """Return the `MemoryBackups` of this run, or `None` without `memory_every`.

        Without it, states of an earlier run are removed from the memory of the host.
        """
        if self.memory_every is None:
            HostMemory(self._folder()).remove()
            return None
        strategy = strategy_of(self.model)
        memory = MemoryBackups(
            self._folder(),
            self.memory_every,
            self._worker_group,
            None if strategy is None else strategy.extended.connect_workers,
            reads_when_disabled=self._continues_after_loss(),
        )
        self._position.exit_stack.callback(memory.close)
        return memory

    def _continues_after_loss(self) -> bool:
        """Return whether `fit` continues on the other workers if one is lost.

        It does with the option `on_loss="continue"` of the strategy.
        """
        strategy = strategy_of(self.model)
        return strategy is not None and strategy.extended.continues_after_loss

    def _recovery_option(self) -> str:
        """Return the option that lets `fit` go back to a backup without a restart.

        Returns:
            String for messages that names `on_loss="continue"`, or else a callback
            with `action="rollback"`; `""` if neither is set.
        """
        if self._continues_after_loss():
            return '`on_loss="continue"`'
        options = (getattr(other, "rollback_name", "") for other in self._others)
        return next(filter(None, options), "")

    @functools.cached_property
    def _path(self) -> str:
        """Path or URL of the directory, as it was when `fit` first began."""
        return absolute_path(self.directory)

    def _folder(self) -> str:
        """Return the backup directory; each job of `tfdp run --islands` has its own."""
        island = Island.from_environment()
        if island is None:
            return self._path
        return f"{self._path.rstrip('/')}/island-{island.index}"

    def _save_for_recovery(self, epoch: int, batches: int, logs: Any) -> None:
        """Add a backup to which this `fit` itself can go back, without a restart.

        It is saved in memory, or in the directory if saves in memory are off or fail.

        Args:
            epoch: Int, the epoch in which `fit` continues.
            batches: Int, completed batches of that epoch.
            logs: Dict, the logs of the last batch.
        """
        memory = self._memory
        if memory is not None and memory.is_enabled:
            self._save(epoch, batches, logs, [memory])
        if memory is None or not memory.is_enabled:
            self._save(epoch, batches, logs, [self._backups])

    def _save_and_exit(self, epoch: int, batches: int, logs: Any) -> None:
        """Save on a preemption notice, print a line, and exit with code 75.

        All workers call it, once any of them has a notice. With `on_loss="continue"`,
        it returns on the workers without a notice, and these continue to train.

        Args:
            epoch: Int, the epoch in which a resumed run continues.
            batches: Int, completed batches of that epoch.
            logs: Dict, the logs of the last batch.
        """
        continues = self._continues_after_loss()
        if continues and not self._watch.all_workers_notified(self._total):
            self._save_for_recovery(epoch, batches, logs)
            # All workers wait until the save has ended: otherwise those that continue
            # would wait in their next step for those that exit.
            self._backups.finish()
            if self._notice.is_received:
                self._notice.exit("the other workers continue", prints=True)
            return
        # `close` prints the error of an earlier save instead of raising it, since it
        # must not prevent this last backup before the process exits.
        self._backups.close()
        self._save(epoch, batches, logs, [self._backups])
        self._backups.finish()
        if self._memory is not None:
            self._memory.delete()
        self._notice.exit(
            f"saved training at step {self._total} in {self.directory}. Run the same "
            "command to resume",
            prints=self._worker_group.is_chief,
        )

    def _resume(self, resumption: Resumption) -> None:
        """Continue from a backup: load it now, or when its unfinished epoch begins."""
        if resumption.run_metadata["batches"] or self.save_freq != "epoch":
            self._warn_about_position(resumption.difference)
        is_pending = resumption.begin(self.params, self.directory)
        self._pending = resumption if is_pending else None
        self._total, self._has_state = resumption.run_metadata["steps"], True

    def _warn_about_position(self, difficulty: str | None) -> None:
        """Warn that the position in the data cannot be restored, if it cannot.

        Args:
            difficulty: String, a clause that says why it cannot, or `None` if it can.

        Raises:
            ValueError: Instead, if `fit` may go back to a backup without a restart.
        """
        option = self._recovery_option()
        if difficulty is not None and option:
            raise ValueError(
                f"{option} continues at the same position in the data, which cannot be "
                f"restored: {difficulty}."
            )
        if difficulty is not None:
            user_code.warn(
                f"The position in the data cannot be restored: {difficulty}. A run "
                "that is interrupted within an epoch begins that epoch again."
            )

    def _build_model(self) -> None:
        """Build metrics and optimizer before training, for a model on one device.

        Keras would build them in the first step, too late to restore them.
        """
        if not tf_distribute.is_one_device(self.model.distribute_strategy):
            return
        spec = tf_data.local_element_spec(self._position.dataset)
        leaves = [leaf for leaf in keras.tree.flatten(spec) if leaf is not None]
        if all(leaf.shape.rank is not None for leaf in leaves):
            keras_model.build_symbolically(self.model, spec)


def _check_arguments(save_freq: Any, batch: Any) -> None:
    """Raise `ValueError` if an argument of `BackupAndRestore` is invalid."""
    is_epoch = isinstance(save_freq, str) and save_freq == "epoch"
    if not is_epoch and not is_integer(save_freq, least=1):
        raise ValueError(
            '`save_freq` must be "epoch" or an integer of at least 1. '
            f"Received: save_freq={save_freq!r}"
        )
    check_choice("batch", batch, ("global", "per_replica"))
