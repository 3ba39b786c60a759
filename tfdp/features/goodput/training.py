"""The feature of `fit` that records goodput: a callback, and the times of steps."""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives.step_events import StepDataWaits, data_waits
from tfdp.features.goodput.account import CLASSES
from tfdp.features.goodput.ledger import Launch, LedgerFile, Moment
from tfdp.features.goodput.recorder import GoodputRecorder
from tfdp.features.monitor.meter import TimedSteps
from tfdp.features.monitor.sinks import has_tensorboard
from tfdp.ground import forks
from tfdp.ground._compat import random_seeds
from tfdp.ground.base import activities, loops
from tfdp.ground.base.feature import Feature, Fit, register
from tfdp.training.keras_hooks.worker_callbacks import (
    backup_callbacks,
    callback_list,
    prepend_callback,
)

# Name of a subfolder of a log directory, and prefix of the tags. A subfolder, since
# another callback writes into the directory itself; TensorBoard shows it as a run.
_SCALARS = "goodput"


class _Goodput(Feature):
    """Hooks of `fit` that record the time of a job with backups or with a launcher.

    Attributes:
        recorder: `GoodputRecorder` of worker 0 during `fit`, or `None`.
    """

    def __init__(self) -> None:
        self.recorder: GoodputRecorder | None = None
        self._latest: GoodputRecorder | None = None
        self._place = ""
        self._wait: StepDataWaits | None = None
        self._is_measuring = False
        self._num_fits = 0

    def choose_callbacks(self, fit: Fit) -> None:
        """Begin to record a `fit` that has backups, or whose job has a launcher.

        All workers measure their steps; worker 0 adds the callback that records them to
        the arguments of `fit`. A `fit` inside another one is not recorded separately.
        """
        # A `fit` that a callback of another `fit` runs is a part of that one's record.
        if loops.current() is not None:
            return
        callbacks = callback_list(fit.arguments.get("callbacks"))
        self._num_fits += not any(getattr(c, "is_retry", False) for c in callbacks)
        # `after_fit`, which ends measurements, is not called for a `fit` that failed
        # before its loop, nor for one without a tfdp strategy.
        self._end_measuring()
        directory = _directory_of(fit.arguments.get("callbacks"))
        launch = Launch.from_environment()
        if directory is None and launch is None:
            return
        if fit.strategy is not None:
            self._measure_steps(fit.model)
        extended = getattr(fit.strategy, "extended", None)
        if extended is None or (
            extended.worker_group.is_job_chief and not extended.is_applicant
        ):
            # In a later generation of the cluster, this worker may have replaced a lost
            # worker 0, whose ledger it continues without a restart of the job.
            continues = extended is not None and extended.generation > 0
            recorder = self._recorder_at(directory, launch, continues=continues)
            self._record(fit, recorder)

    def wrap_step(self, model: Any, step: Callable) -> Callable:
        """Return a step that is timed while `fit` is recorded; else `step` itself."""
        if not self._is_measuring or loops.is_nested():
            return step
        timed = self.timed(model, step)
        timed.records_waits = bool(data_waits)  # type: ignore[attr-defined]
        return timed

    def after_fit(self, fit: Fit) -> None:
        """End the record of a `fit`, as a failure unless `on_train_end` was called."""
        if loops.is_nested():
            return
        recorder = self.recorder
        self._end_measuring()
        if recorder is not None:
            for callback in callback_list(fit.arguments.get("callbacks")):
                if isinstance(callback, _RecorderCallback) and not callback.is_complete:
                    recorder.fit_ends(is_complete=False)

    def _record(self, fit: Fit, recorder: GoodputRecorder) -> None:
        """Add the callback of a recorder to a `fit`, and begin to record.

        Args:
            fit: `Fit`, whose callbacks are changed.
            recorder: `GoodputRecorder` of this process.
        """
        given = without_ledger(fit.arguments.get("callbacks"))
        callback = _RecorderCallback(recorder, callback_list(given))
        fit.arguments["callbacks"] = prepend_callback(fit.model, given, callback)
        if self._wait is not None:
            recorder.wait_seconds = self._wait.read_seconds
        recorder.exposed_seconds = callback.exposed_seconds
        self.recorder = recorder
        recorder.fit_begins()

    def _end_measuring(self) -> None:
        """Detach the recorder from `fit`; steps traced later have no time stamps."""
        self.recorder, self._is_measuring = None, False
        if self._wait is not None:
            data_waits.deactivate(self._wait)

    def timed(self, model: Any, step: Callable) -> Callable:
        """Wrap a step so that `recorder`, while it is set, times each call.

        `wrap_step` calls it for models with a tfdp strategy, and `_RecorderCallback`
        for others.

        Args:
            model: The Keras model.
            step: Callable, the function of a step.

        Returns:
            Callable with the arguments of `step`.
        """
        # With hooks in `data_waits`, `_num_traces` counts each trace of a step, since
        # time stamps are added to it. Without hooks, only the first call of a compiled
        # step is known to trace it.
        is_new = not data_waits and not model.run_eagerly

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            """Run the step, and return its result.

            The recorder, if it is set, is notified of the step's beginning and end.
            """
            nonlocal is_new
            recorder, num_traces = self.recorder, self._num_traces
            if recorder is None:
                return step(*args, **kwargs)
            recorder.step_begins()
            try:
                result = step(*args, **kwargs)
            except BaseException as error:
                is_end = isinstance(error, (tf.errors.OutOfRangeError, StopIteration))
                recorder.step_fails(has_data=not is_end)
                raise
            was_traced = is_new or self._num_traces > num_traces
            is_new = False
            recorder.step_ends(model.steps_per_execution, was_traced=was_traced)
            return result

        call.is_timed = True  # type: ignore[attr-defined]
        return call

    @property
    def _num_traces(self) -> int:
        """Int, how often a step with time stamps has been traced so far."""
        return 0 if self._wait is None else self._wait.num_traces

    def _measure_steps(self, model: Any) -> None:
        """Have the step of a model timed, with time stamps of waits for data.

        All workers add the stamps, since they compare their programs. Deterministic
        operations have no clock: waits are then a part of steps.

        Args:
            model: The Keras model.
        """
        self._is_measuring = True
        if not random_seeds.is_deterministic():
            self._wait = self._wait or StepDataWaits()
            data_waits.activate(self._wait)
        function = getattr(model, "train_function", None)
        if getattr(function, "records_waits", None) != bool(data_waits):
            model.train_function = None

    def _recorder_at(
        self, directory: str | None, launch: Launch | None, *, continues: bool
    ) -> GoodputRecorder:
        """Return the latest recorder, or a new one if the ledger is in another folder.

        Args:
            directory: String, the directory of backups, or `None` without any.
            launch: `Launch`, or `None` without a launcher.
            continues: Bool, whether the job has continued without a restart. A new
                recorder then begins now, not at the start of the process.

        Returns:
            `GoodputRecorder`. If it is new, the latest one was closed.
        """
        place = directory or self._place or ("" if launch is None else launch.folder)
        if self._latest is not None and place == self._place:
            return self._latest
        self._close()
        is_first = self._num_fits == 1 and not _is_interactive() and not continues
        since = Moment.of_process_start() if is_first else Moment.now()
        is_asynchronous = bool(tf.config.list_logical_devices("GPU"))
        self._place = place
        self._latest = GoodputRecorder(
            LedgerFile(directory, launch),
            launch,
            since,
            is_asynchronous=is_asynchronous,
            continues=continues,
            follows=self._num_fits > 1,
        )
        activities.observers.activate(self._latest)
        forks.at_exit(self._close)
        return self._latest

    def _close(self) -> None:
        """Close the latest recorder, which writes its last lines."""
        if self._latest is not None:
            activities.observers.deactivate(self._latest)
            self._latest.close()
            self._latest = None


class _RecorderCallback(keras.callbacks.Callback):
    """Callback that records the epochs and batches of `fit`, called before the others.

    It has no hook after a batch, since Keras would wait there for the logs.

    Args:
        recorder: `GoodputRecorder` of the process.
        others: List of the other callbacks of `fit`.
    """

    def __init__(self, recorder: GoodputRecorder, others: list) -> None:
        super().__init__()
        self.is_complete = False
        self._recorder, self._others = recorder, others
        # The writer of each folder stays open until `fit` ends: each new writer would
        # create another file of events.
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Wrap the step of a model without a tfdp strategy, so that it is timed."""
        function = self.model.train_function
        if not hasattr(function, "is_timed"):
            self.model.train_function = FEATURE.timed(self.model, function)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notify the recorder that an epoch begins."""
        self._recorder.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notify the recorder that a batch begins."""
        self._recorder.batch_begins(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the job's shares of time to other callbacks' TensorBoard folders."""
        for folder in sorted(set(filter(None, map(_log_dir_of, self._others)))):
            # An error of writing for TensorBoard is ignored, since the ledger has the
            # same numbers.
            with contextlib.suppress(OSError, tf.errors.OpError):
                self._write_scalars(os.path.join(folder, _SCALARS), epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Record that `fit` is complete, and close the files for TensorBoard."""
        self.is_complete = True
        self._recorder.fit_ends(is_complete=True)
        for writer in self._writers.values():
            with contextlib.suppress(OSError, tf.errors.OpError):
                writer.close()

    def _write_scalars(self, folder: str, epoch: int) -> None:
        """Write the shares of the job for TensorBoard, into one file for the `fit`.

        Args:
            folder: String, the folder of the file.
            epoch: Int, number of the epoch, from 0.
        """
        if not has_tensorboard():
            return
        if folder not in self._writers:
            self._writers[folder] = tf.summary.create_file_writer(folder)
        shares = self._recorder.shares()
        with self._writers[folder].as_default():
            for name in CLASSES:
                tf.summary.scalar(f"{_SCALARS}/{name}_share", shares.share(name), epoch)
        self._writers[folder].flush()

    def exposed_seconds(self) -> float | None:
        """Return the exposed communication of the steps since the last call.

        It is read from the first of the other callbacks that has timed new steps, such
        as `CommunicationMonitor`, at most the last five of them. These are removed from
        the callback's `latest`.

        Returns:
            Float, the mean of a step in seconds; `None` without timed steps since the
            last call, or if their communication was not measured.
        """
        for callback in self._others:
            if isinstance(callback, TimedSteps) and callback.meter and callback.latest:
                readings = list(callback.latest)
                callback.latest.clear()
                samples = [callback.meter.sample(reading) for reading in readings]
                seconds = statistics.fmean(each.exposed_seconds for each in samples)
                # The comparison is false for NaN, which `seconds` is before the first
                # measurement of communication.
                return seconds if seconds >= 0 else None
        return None


def without_ledger(callbacks: Any) -> Any:
    """Return callbacks without the `_RecorderCallback` of an earlier `fit`.

    The callback is removed from a `CallbackList` in place. Any other argument, to which
    an earlier `fit` has added nothing, is returned unchanged.

    Args:
        callbacks: Callback, list of callbacks or `CallbackList` from the user.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given = callbacks.callbacks
        given[:] = [each for each in given if not isinstance(each, _RecorderCallback)]
    return callbacks


def _log_dir_of(callback: Any) -> str | None:
    """Return the log folder of TensorBoard's callback or a monitor, else `None`."""
    if not isinstance(callback, (keras.callbacks.TensorBoard, TimedSteps)):
        return None
    folder = getattr(callback, "log_dir", None)
    return None if folder is None else os.fspath(folder)


def _directory_of(callbacks: Any) -> str | None:
    """Return the absolute path of the directory of a backup callback, or `None`.

    It is `None` without backups, and for backups in an object store, where a ledger
    cannot be appended to.
    """
    for callback in backup_callbacks(callbacks):
        directory = getattr(callback, "directory", None)
        if isinstance(directory, str) and "://" not in directory:
            return os.path.abspath(directory)
    return None


def _is_interactive() -> bool:
    """Return whether a person types the code of this process, as in a notebook."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


FEATURE = _Goodput()
register(FEATURE)
