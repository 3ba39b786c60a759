"""Monitor of a step's communication, its buckets and stragglers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdp.callbacks.bases import MeasuringCallback
from tfdp.checkpoint.files import error_text
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.worker_group import Mailbox
from tfdp.features.monitor.advice import facts_of, loss_scale_of, settings_of
from tfdp.features.monitor.device_meter import meter_for
from tfdp.features.monitor.meter import Meter
from tfdp.features.monitor.readings import Reading
from tfdp.features.monitor.report import ReportThread, RunReport
from tfdp.features.monitor.windows import Window, fraction, mean_of, window_of
from tfdp.ground import user_code
from tfdp.ground.arguments import checked_bool, checked_integer, checked_path
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.files import try_create_folder
from tfdp.ground.base.finalizers import finalizers

# `CommunicationMonitor.recent` averages at most this many steps; older readings are
# dropped, so that a long training does not fill the memory.
_KEPT_STEPS = 200


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """Mean times of this worker over several steps, in seconds per step.

    Args:
        step_seconds: Float, duration of a step.
        compute_seconds: Float, the step without exposed communication.
        communication_seconds: Float, time in which a collective was running.
        exposed_seconds: Float, time in which only collectives were running.
        communication_fraction: Float, s = T_comm / (T_comp + T_comm).
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    communication_fraction: float


class CommunicationMonitor(MeasuringCallback):
    """Measure computation and communication of steps, and advise what to speed up.

    Per window of `every` steps the first worker writes: step time with its
    percentiles, samples per second, compute time, communication time and its exposed
    part, seconds of each bucket, bytes sent, busbw, the norm of the gradient, loss
    scale and skipped steps, each worker's step time and how long it waits for the
    others. These are written to TensorBoard (tags by subject, such as
    `communication/exposed_seconds` and `step/seconds`), to `communication.csv`
    and, at the end of `fit`, to `communication.json`; a table and one sentence of
    advice are printed. A persistent straggler is reported once per epoch, with a
    remedy.

    On CPUs the times are taken by time stamps inside the graph; on GPUs, whose kernels
    run asynchronously, by the device's own profile of one step per epoch.

    Args:
        log_dir: String or path-like, directory of the reports.
        every: Int, steps of a window. Defaults to 10.
        histogram: Bool, whether TensorBoard also gets histograms. Defaults to `True`.

    Raises:
        ValueError: If an argument is invalid; in `fit`, if `log_dir` cannot be
            written or the model has a strategy other than tfdp's.

    Example:

    >>> CommunicationMonitor("logs", every=20).every
    20

    Source: Li et al. 2020, https://arxiv.org/abs/2006.15704, for exposed
    communication; nccl-tests' PERFORMANCE.md for busbw.
    """

    # The first worker combines the windows of all workers, so `fit` raises an error if
    # these settings differ between workers.
    compared = ("every", "histogram")

    def __init__(
        self, log_dir: str | os.PathLike[str], every: int = 10, histogram: bool = True
    ) -> None:
        super().__init__()
        self.log_dir = Path(checked_path("log_dir", log_dir, "the path of a directory"))
        self.every = checked_integer("every", every, 1)
        self.histogram = checked_bool("histogram", histogram)
        self._epoch = 0
        self._num_fits = 0
        self._run_report: RunReport | None = None
        self._report_thread: ReportThread | None = None
        self._window: list[Reading] = []
        self._recent: collections.deque[Reading] = collections.deque(maxlen=_KEPT_STEPS)
        self._latest_meter: Meter | None = None

    def recent(self, num_steps: int = 20) -> StepStatistics:
        """Compute mean times over the last steps of this worker.

        Args:
            num_steps: Int, the number of steps, at most 200. Defaults to 20.

        Returns:
            `StepStatistics`.

        Raises:
            ValueError: If `num_steps` is not an integer of at least 1.
            RuntimeError: If no step has been measured yet.
        """
        num_steps = checked_integer("num_steps", num_steps, 1)
        last = list(self._recent)[-num_steps:]
        if not last or self._latest_meter is None:
            raise RuntimeError(
                "No step has been measured yet: the first step of `fit` is traced, and "
                "does not count."
            )
        mean = mean_of([self._latest_meter.sample(reading) for reading in last])
        busy, compute = mean.communication_seconds, mean.compute_seconds
        return StepStatistics(
            mean.step_seconds,
            compute,
            busy,
            mean.exposed_seconds,
            fraction(busy, compute),
        )

    def find_problem(self, num_steps: int | None) -> str:
        """Return why `log_dir` cannot be written, or `""`; create it if it is missing.

        Runs on the first worker, before training.

        Args:
            num_steps: Int, steps of the training, or `None` if unknown. Not used.
        """
        del num_steps
        return try_create_folder(self.log_dir, "log_dir")

    def on_train_begin(self, logs: Any = None) -> None:
        """Have steps traced with time stamps, and start the reporting thread."""
        strategy = strategy_of(self.model)
        worker_group = worker_group_of(self.model)
        self._recent.clear()
        self._window = []
        self.meter = meter_for(self.model, strategy, norm_every=self.every)
        self._latest_meter = self.meter
        if strategy is not None:
            self.meter.start()
        # After an error in an earlier `fit`, Keras did not call `on_train_end`, so the
        # reporting thread of that `fit` must be ended here.
        if self._report_thread is not None:
            self._end_thread()
        self._num_fits += 1
        if worker_group.is_chief:
            hosts = strategy.extended.hosts if strategy else ("localhost",)
            self._run_report = RunReport(
                self.log_dir, hosts, histogram=self.histogram, number=self._num_fits
            )
        self._report_thread = ReportThread(Mailbox(worker_group), self._run_report)
        self._report_thread.start()
        # Keras calls no hook when `fit` raises an error. A finalizer then stops the
        # thread when this callback is deleted.
        self._finalizer = finalizers.register(self, self._report_thread.stop)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch, and restart the count of its batches."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Store a reading; at the end of a window, pass it to the reporting thread.

        That thread sends the window to the first worker; the steps of no worker wait
        for it. The first worker also prints what it has found about stragglers.

        Args:
            num_steps: Int, steps of the execution that has ended.
            reading: `Reading` of the execution, or `None` if it was not timed.
        """
        if reading is not None:
            self._window.append(reading)
            self._recent.append(reading)
        if self.step // self.every > (self.step - num_steps) // self.every:
            self._report()
        self._print_notices()

    def on_train_end(self, logs: Any = None) -> None:
        """Report the last window, end the reporting thread, and stop timing steps.

        The first worker also writes and prints the summary.
        """
        if self._report_thread is None:
            return
        self._report()
        self._end_thread()
        if self._run_report is not None:
            self._run_report.end_epoch()
        self._print_notices()
        self.meter = None
        error = self._report_thread.error
        self._report_thread = None
        try:
            if self._run_report is not None and self._run_report.totals.num_steps:
                facts = facts_of(self.model)
                settings = settings_of(self.model, self.every)
                with contextlib.closing(self._run_report):
                    print(self._run_report.finish(facts, settings))
        except (OSError, tf.errors.OpError) as later:  # TensorBoard raises `OpError`
            error = error or later
        if error is not None:
            # A failed report is a warning and not an error, since training has
            # succeeded, and the other workers would wait for this one.
            user_code.warn(
                "`CommunicationMonitor` could not write all of its reports: "
                f"{error_text(error)}"
            )

    def _end_thread(self) -> None:
        """Wait for the reporting thread to finish, and detach its finalizer."""
        assert self._report_thread is not None
        self._report_thread.close()
        self._finalizer.detach()

    def _print_notices(self) -> None:
        """Print, on the first worker, the stragglers found in completed epochs."""
        while self._run_report is not None and self._run_report.notices:
            print(f"\nCommunicationMonitor: {self._run_report.notices.popleft()}")

    def _report(self) -> None:
        """Pass the readings so far to the reporting thread, and begin a new window."""
        readings, self._window = self._window, []
        meter = self.meter
        if not readings or meter is None or self._report_thread is None:
            return
        if self._run_report is not None:
            self._run_report.labels = meter.labels
        scale, skipped = loss_scale_of(self.model.optimizer)
        step, epoch = self.step, self._epoch

        def compute_window() -> Window:
            """Return the means of the readings; the reporting thread calls it."""
            return window_of(
                [meter.sample(reading) for reading in readings],
                step=step,
                epoch=epoch,
                loss_scale=scale,
                skipped_steps=skipped,
            )

        self._report_thread.put(compute_window)
