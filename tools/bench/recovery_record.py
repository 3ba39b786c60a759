"""The same training, kills and record for each side of the benchmark `recovery`."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

NUM_WORKERS, NUM_SAMPLES, BATCH_SIZE, EPOCHS = 3, 1200, 24, 4
NUM_STEPS = EPOCHS * NUM_SAMPLES // BATCH_SIZE
UNITS, RATE, STEP_SECONDS = 64, 0.01, 0.02


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, float32 `[NUM_SAMPLES, 16]`, and targets."""
    x = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 16)).astype("float32")
    return x, np.tanh(x[:, :1] * x[:, 1:2] + x[:, 2:3])


def batch(step: int) -> np.ndarray:
    """Return the indices of the samples of a step from 0, int `[BATCH_SIZE]`."""
    first = step * BATCH_SIZE % NUM_SAMPLES
    return np.arange(first, first + BATCH_SIZE)


class Record:
    """Kills its process where the benchmark says so, and writes what a step has used.

    Args:
        rank: Int, of this worker.
    """

    def __init__(self, rank: int) -> None:
        self.folder = Path(os.environ["RECOVERY_FOLDER"])
        self._rank = rank
        kills = json.loads(os.environ["RECOVERY_KILLS"])
        self._kills = [step for worker, step in kills if worker == rank]
        self._file = (self.folder / f"steps-{rank}-{os.getpid()}").open("a")

    def before(self, step: int) -> None:
        """Kill this process if the step is one of its kills, each once."""
        path = self.folder / f"kill-{self._rank}-{step}"
        if step in self._kills and not path.exists():
            path.write_text(json.dumps([time.time(), step]))
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, step: int, samples: Iterable[int]) -> None:
        """Write the samples of this worker that an update has used."""
        line = [time.time(), step, [int(sample) for sample in samples]]
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        time.sleep(STEP_SECONDS)

    def end(self, loss: float) -> None:
        """Write the loss on all data after the last step."""
        (self.folder / f"loss-{self._rank}").write_text(repr(float(loss)))
