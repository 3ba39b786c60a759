"""What a step spends on communication, which bucket, and which worker is slow."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import warnings
from pathlib import Path
from typing import Any

import keras

from tfdp import trainer
from tfdp.agreement import Agreement
from tfdp.mailbox import Mailbox
from tfdp.monitor.board import Board
from tfdp.monitor.facts import facts_of, loss_scale_of, settings_of
from tfdp.monitor.folders import problem_of_folder
from tfdp.monitor.meter import Meter
from tfdp.monitor.meters import meter_for
from tfdp.monitor.readings import Reading
from tfdp.monitor.reporter import Reporter
from tfdp.monitor.windows import Window, fraction, mean_of, window_of
from tfdp.optimizer_arguments import check_strategy
from tfdp.ownership import strategy_of

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


class CommunicationMonitor(keras.callbacks.Callback):
    """Measures where the time of a step goes, and says what would make it shorter.

    Per window of `every` steps the first worker writes: step time with its
    percentiles, samples per second, compute and communication, what of the
    communication is exposed, seconds of each bucket, bytes sent, busbw, the norm of
    the gradient, loss scale and skipped steps, each worker's step time and how long
    it waits for the others. They go to TensorBoard (tags `communication/...`), to
    `communication.csv` and, at the end of `fit`, to `communication.json`; a table
    and one sentence of advice are printed.

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
        trainer.install()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"`every` must be an integer of at least 1. Received: every={every!r}"
            )
        self.log_dir = Path(log_dir)
        self.every = every
        self.histogram = histogram
        self._step = 0
        self._epoch = 0
        self._num_fits = 0
        self._meter: Meter | None = None
        self._board: Board | None = None
        self._reporter: Reporter | None = None
        self._window: list[Reading] = []
        self._recent: collections.deque[Reading] = collections.deque(maxlen=_KEPT_STEPS)
        self._last_meter: Meter | None = None
        self._last_batch = -1

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

    def set_model(self, model: Any) -> None:
        """Checks the strategy; a step that was traced before is traced again."""
        super().set_model(model)
        check_strategy(model.distribute_strategy)
        model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Lets steps be traced with time stamps, and starts to report."""
        strategy = strategy_of(self.model)
        agreement = strategy.extended.agreement if strategy else Agreement(0, 1)
        self._recent.clear()
        self._window = []
        self._meter = meter_for(self.model, strategy, norm_every=self.every)
        self._last_meter = self._meter
        if strategy is not None:
            self._meter.start()
        if self._reporter is not None:  # of a `fit` that was broken off
            self._reporter.close()
        self._num_fits += 1
        if agreement.rank == 0:
            hosts = strategy.extended.hosts if strategy else ("localhost",)
            self._board = Board(
                self.log_dir, hosts, histogram=self.histogram, number=self._num_fits
            )
        self._reporter = Reporter(Mailbox(agreement), self._board)
        self._reporter.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count batches."""
        self._epoch = epoch
        self._last_batch = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes the time of the first step of an epoch."""
        if self._meter is not None:
            self._meter.step_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Reads what the step noted; reports when a window is full."""
        if self._meter is None:
            return
        num_steps = batch - self._last_batch
        self._last_batch = batch
        reading = self._meter.step_ends(num_steps)
        if reading is not None:
            self._window.append(reading)
            self._recent.append(reading)
        before, self._step = self._step, self._step + num_steps
        if self._step // self.every > before // self.every:
            self._report(self._meter)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Says which worker is slow, once an epoch."""
        if self._meter is not None:
            self._meter.interrupt()
        if self._board is not None and self._board.straggler is not None:
            print(f"\nCommunicationMonitor: {self._board.straggler}.")

    def on_test_begin(self, logs: Any = None) -> None:
        """What an evaluation takes belongs to no step."""
        if self._meter is not None:
            self._meter.interrupt()

    def on_train_end(self, logs: Any = None) -> None:
        """Writes what is left, and on the first worker the summary."""
        if self._meter is None or self._reporter is None:
            return
        self._report(self._meter)
        self._reporter.close()
        self._meter = None
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

    def _report(self, meter: Meter) -> None:
        """Hands the window to the thread that computes and writes."""
        readings, self._window = self._window, []
        if not readings or self._reporter is None:
            return
        if self._board is not None:
            self._board.labels = meter.labels
        scale, skipped = loss_scale_of(self.model.optimizer)
        make = functools.partial(
            self._window_of, meter, readings, self._step, self._epoch, scale, skipped
        )
        self._reporter.put(make)

    @staticmethod
    def _window_of(
        meter: Meter,
        readings: list[Reading],
        step: int,
        epoch: int,
        scale: float,
        skipped: int,
    ) -> Window:
        return window_of(
            [meter.sample(reading) for reading in readings],
            step=step,
            epoch=epoch,
            loss_scale=scale,
            skipped_steps=skipped,
        )
