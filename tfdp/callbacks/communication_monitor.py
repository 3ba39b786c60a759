"""What a step spends on communication, which bucket, and which worker is slow."""

from __future__ import annotations

import collections
import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

from tfdp.base.ownership import strategy_of
from tfdp.callbacks.measuring import MeasuringCallback
from tfdp.coordination.mailbox import Mailbox
from tfdp.coordination.worker_group import WorkerGroup
from tfdp.monitor.board import Board
from tfdp.monitor.facts import facts_of, loss_scale_of, settings_of
from tfdp.monitor.folders import problem_of_folder
from tfdp.monitor.meter import Meter
from tfdp.monitor.meters import meter_for
from tfdp.monitor.readings import Reading
from tfdp.monitor.reporter import Reporter
from tfdp.monitor.windows import Window, fraction, mean_of, window_of

_KEPT_STEPS = 200


@dataclasses.dataclass(frozen=True)
class StepStatistics:
    """Means over some steps of this worker, in seconds a step.

    Args:
        step_seconds: Float.
        compute_seconds: Float, what is not exposed communication.
        communication_seconds: Float, in which a collective was under way.
        exposed_seconds: Float, in which nothing but collectives was.
        communication_fraction: Float, s = T_comm / (T_comp + T_comm).
    """

    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    communication_fraction: float


class CommunicationMonitor(MeasuringCallback):
    """Measures where the time of a step goes, and says what would make it shorter.

    Per window of `every` steps the first worker writes: step time with its
    percentiles, samples per second, compute and communication, what of the
    communication is exposed, seconds of each bucket, bytes sent, busbw, the norm of
    the gradient, loss scale and skipped steps, each worker's step time and how long
    it waits for the others. They go to TensorBoard (tags `communication/...`), to
    `communication.csv` and, at the end of `fit`, to `communication.json`; a table
    and one sentence of advice are printed. A worker that the others wait for again
    and again is named once an epoch, with what to do about it.

    On CPUs time stamps inside the graph tell; on GPUs, whose kernels run after
    their launch, the device's own profile of one step an epoch does.

    Args:
        log_dir: String or path-like, where to write.
        every: Int, steps of a window. Defaults to 10.
        histogram: Bool, whether TensorBoard gets histograms too. Defaults to `True`.

    Raises:
        ValueError: If `every` is not positive; in `fit`, if `log_dir` cannot be
            written or the model's strategy is not tfdp's.

    Example:

    >>> CommunicationMonitor("logs", every=20).every
    20

    Source: Li et al. 2020, https://arxiv.org/abs/2006.15704, for what is exposed;
    nccl-tests' PERFORMANCE.md for busbw.
    """

    def __init__(
        self, log_dir: str | os.PathLike, every: int = 10, histogram: bool = True
    ) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"`every` must be an integer of at least 1. Received: every={every!r}"
            )
        self.log_dir = Path(log_dir)
        self.every = every
        self.histogram = histogram
        self._epoch = 0
        self._num_fits = 0
        self._board: Board | None = None
        self._reporter: Reporter | None = None
        self._window: list[Reading] = []
        self._recent: collections.deque[Reading] = collections.deque(maxlen=_KEPT_STEPS)
        self._last_meter: Meter | None = None

    def recent(self, num_steps: int = 20) -> StepStatistics:
        """Means over the last steps of this worker.

        Args:
            num_steps: Int, at most 200. Defaults to 20.

        Returns:
            `StepStatistics`.

        Raises:
            RuntimeError: If no step has been measured yet.
        """
        last = list(self._recent)[-num_steps:]
        if not last or self._last_meter is None:
            raise RuntimeError(
                "No step has been measured yet: the first step of `fit` is traced, and "
                "does not count."
            )
        mean = mean_of([self._last_meter.sample(reading) for reading in last])
        busy, compute = mean.communication_seconds, mean.compute_seconds
        return StepStatistics(
            mean.step_seconds,
            compute,
            busy,
            mean.exposed_seconds,
            fraction(busy, compute),
        )

    # What Keras and tfdp call.

    def find_problem(self, num_steps: int | None) -> str:
        """What is wrong with the settings, or `""`; asked on the first worker."""
        del num_steps
        return problem_of_folder(self.log_dir, "log_dir")

    def on_train_begin(self, logs: Any = None) -> None:
        """Lets steps be traced with time stamps, and starts to report."""
        strategy = strategy_of(self.model)
        worker_group = strategy.extended.worker_group if strategy else WorkerGroup(0, 1)
        self._recent.clear()
        self._window = []
        self.meter = meter_for(self.model, strategy, norm_every=self.every)
        self._last_meter = self.meter
        if strategy is not None:
            self.meter.start()
        if self._reporter is not None:  # of a `fit` that was broken off
            self._reporter.close()
        self._num_fits += 1
        if worker_group.rank == 0:
            hosts = strategy.extended.hosts if strategy else ("localhost",)
            self._board = Board(
                self.log_dir, hosts, histogram=self.histogram, number=self._num_fits
            )
        self._reporter = Reporter(Mailbox(worker_group), self._board)
        self._reporter.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count batches."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Keeps what was read; reports when a window is full."""
        if reading is not None:
            self._window.append(reading)
            self._recent.append(reading)
        if self.step // self.every > (self.step - num_steps) // self.every:
            self._report()
        self._speak()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes what is left, and on the first worker the summary."""
        if self._reporter is None:
            return
        self._report()
        self._reporter.close()
        if self._board is not None:
            self._board.end_epoch()
        self._speak()
        self.meter = None
        error = self._reporter.error
        self._reporter = None
        try:
            if self._board is not None and self._board.totals.num_steps:
                facts = facts_of(self.model)
                settings = settings_of(self.model, self.every)
                print(self._board.finish(facts, settings))
                self._board.close()
        except OSError as later:
            error = error or later
        if error is not None:
            # Training has ended well, and the other workers wait for this one.
            warnings.warn(
                f"`CommunicationMonitor` could not write all of its reports: {error}",
                stacklevel=2,
            )

    def _speak(self) -> None:
        """Prints what the thread has found of the epochs that are over."""
        while self._board is not None and self._board.notices:
            print(f"\nCommunicationMonitor: {self._board.notices.popleft()}")

    def _report(self) -> None:
        """Hands the window to the thread that computes and writes."""
        readings, self._window = self._window, []
        meter = self.meter
        if not readings or meter is None or self._reporter is None:
            return
        if self._board is not None:
            self._board.labels = meter.labels
        scale, skipped = loss_scale_of(self.model.optimizer)
        step, epoch = self.step, self._epoch

        def make() -> Window:
            return window_of(
                [meter.sample(reading) for reading in readings],
                step=step,
                epoch=epoch,
                loss_scale=scale,
                skipped_steps=skipped,
            )

        self._reporter.put(make)
