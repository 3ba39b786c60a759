"""Trace of selected steps: computation and communication of all workers."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from tfdp.callbacks.bases import MeasuringCallback
from tfdp.communication.coordination.worker_group import Mailbox, WorkerGroup
from tfdp.features.monitor.device_meter import meter_for
from tfdp.features.monitor.readings import Reading
from tfdp.features.monitor.sinks import write_json
from tfdp.features.monitor.trace import WorkerTrace, chrome_trace
from tfdp.ground import user_code
from tfdp.ground.arguments import checked_path, is_integer
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.files import try_create_folder
from tfdp.ground.text import pluralize

# Seconds for which the first worker waits for another worker's trace. After that it
# writes the file without the trace, so that a slow worker does not block training.
_PATIENCE_SECONDS = 20.0


class Timeline(MeasuringCallback):
    """Write selected steps as a trace for Perfetto and `chrome://tracing`.

    Each worker has lanes for its steps, for the computation of each replica (forward,
    backward, update) and for its collectives, named by bucket. The clocks of the
    workers are aligned. TensorBoard's profiler can be used at the same time on CPUs.

    Args:
        path: String or path-like, the output file, such as `"timeline.json"`. Open it
            at https://ui.perfetto.dev.
        steps: Tuple of two ints, the first and the last step, counted from 1 over
            all epochs. The first is at least 2, since step 1 is traced. Defaults to
            `(10, 15)`.

    Raises:
        ValueError: If `steps` is invalid; in `fit`, if it is past the end of training,
            `path` cannot be written or the strategy is not tfdp's.

    Example:

    >>> Timeline("timeline.json", steps=(20, 22)).steps
    (20, 22)

    Source: the Trace Event Format,
    https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """

    # The first worker merges the traces of all workers, so `fit` raises an error if
    # they select different steps.
    compared = ("steps",)

    def __init__(
        self, path: str | os.PathLike[str], steps: tuple[int, int] = (10, 15)
    ) -> None:
        super().__init__()
        self.path = Path(checked_path("path", path, "the path of a file"))
        self.steps = _check_steps(steps)
        self._mailbox: Mailbox | None = None
        self._readings: list[tuple[int, Reading]] = []

    @property
    def _named_steps(self) -> str:
        """String, the selected steps: "step 10", or "steps 10 to 15"."""
        first, last = self.steps
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def find_problem(self, num_steps: int | None) -> str:
        """Return why `steps` or `path` is unusable, or `""`; runs on the first worker.

        Args:
            num_steps: Int, steps of the training, or `None` if unknown.
        """
        if num_steps is not None and num_steps < self.steps[1]:
            return (
                "Training ends before the last of the steps that `Timeline` records. "
                f"Received: steps={self.steps}, and {pluralize(num_steps, 'step')} of "
                "training"
            )
        return try_create_folder(self.path.parent, "path")

    def on_train_begin(self, logs: Any = None) -> None:
        """Have steps traced with time stamps.

        Raises:
            ValueError: If the model has no strategy of tfdp.
        """
        strategy = strategy_of(self.model)
        if strategy is None:
            raise ValueError(
                "`Timeline` needs a model in the scope of a strategy of tfdp, such as "
                "`tfdp.auto_strategy()`. Received: a model under no strategy"
            )
        self._worker_group: WorkerGroup = strategy.extended.worker_group
        self._host: str = strategy.extended.hosts[self._worker_group.rank]
        self._mailbox = Mailbox(self._worker_group)
        self.step = 0
        self._readings = []
        self.meter = meter_for(self.model, strategy)
        self.meter.start()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """If this step is selected, begin to record it; on GPUs, start a profile."""
        if self.meter is not None and self.step >= self.steps[0] - 1:
            self.meter.trace_begins()
        super().on_train_batch_begin(batch, logs)

    def on_step_end(self, num_steps: int, reading: Reading | None) -> None:
        """Store the `Reading` of a selected step; write the file after the last one."""
        first, last = self.steps
        if reading is not None and self.step >= first:
            self._readings.append((self.step, reading))
        if self.step >= last:
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the steps so far if training ended before the last selected one."""
        if self.meter is None:
            return
        user_code.warn(
            f"`Timeline` records {self._named_steps}, but training ended after step "
            f"{self.step}."
        )
        self._write()

    def _write(self) -> None:
        """Send this worker's trace to the first worker, which writes the file.

        All workers call it. It ends the measurement of steps on this worker.
        """
        meter, self.meter = self.meter, None
        assert meter is not None
        assert self._mailbox is not None
        trace = meter.trace(self._worker_group.rank, self._host, self._readings)
        if not self._worker_group.is_chief:
            self._mailbox.send(0, json.dumps(dataclasses.asdict(trace)))
            return
        workers = [trace]
        for rank in range(1, self._worker_group.num_workers):
            text = self._mailbox.receive(0, rank, _PATIENCE_SECONDS)
            if text is not None:
                workers.append(WorkerTrace.from_dict(json.loads(text)))
        try:
            self._write_file([worker for worker in workers if worker.slices])
        except OSError as error:
            # A failed write is a warning and not an error, since the other workers are
            # already in the next step and would wait for this one.
            user_code.warn(f"`Timeline` could not be written: {error}")

    def _write_file(self, workers: list[WorkerTrace]) -> None:
        """Write the merged trace, or warn if the first worker has recorded no steps.

        Args:
            workers: List of `WorkerTrace`, of the workers that have recorded steps.
        """
        if workers and workers[0].rank == 0:
            write_json(self.path, chrome_trace(workers))
        else:
            user_code.warn(
                f"`Timeline` has no record of {self._named_steps}: the execution in "
                "which steps are traced is not measured."
            )


def _check_steps(steps: Any) -> tuple[int, int]:
    """Return the argument `steps` as a pair of ints, or raise if it is invalid."""
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2
    if not is_pair or not all(map(is_integer, steps)):
        raise ValueError(
            "`steps` must be the numbers of the first and the last step, such as "
            f"(10, 15). Received: steps={steps!r}"
        )
    first, last = map(int, steps)
    if first < 2 or last < first:
        raise ValueError(
            "`steps` must begin at 2 or later, since the first step is traced, and "
            f"must not end before it begins. Received: steps={steps!r}"
        )
    return first, last
