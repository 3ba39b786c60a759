"""Bucket-size study: train a script once for each size, in a balanced order."""

from __future__ import annotations

import csv
import dataclasses
import math
import random
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STATISTICS = "statistics.csv"
NEEDED = ("step_seconds", "samples_per_second", "communication_fraction")
OPTIONAL = ("num_buckets", "val_loss", "val_accuracy")
_LOG = "output.log"
_LAST_LINES = 12
_GRACE_SECONDS = 15  # longer than the launcher gives its workers


class StudyError(ValueError):
    """A training run failed, or did not leave what the study needs."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """Statistics of one epoch; `None` where the script gives none."""

    step_seconds: float
    samples_per_second: float
    communication_fraction: float
    num_buckets: float | None
    val_loss: float | None
    val_accuracy: float | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of the script."""

    bucket_mb: float
    repeat: int
    epochs: tuple[Epoch, ...]


@dataclasses.dataclass(frozen=True)
class Study:
    """Command and folder of a study.

    Args:
        script: String, the training script. It must take `--bucket-mb X` and
            `--output DIR`, and write `DIR/statistics.csv`.
        arguments: Sequence of strings, for the script.
        launcher: Sequence of strings, the command that starts the workers; the
            interpreter and the script are added to it. Empty: `tfdp run`.
        num_workers: Int, of `tfdp run`.
        folder: Path, for a folder of each run.

    Example:

    >>> study = Study("train.py", ["--epochs", "2"], ["srun"], 2, Path("out"))
    >>> study.command(0.5, Path("out/a"))[2:]
    ['train.py', '--bucket-mb', '0.5', '--output', 'out/a', '--epochs', '2']
    """

    script: str
    arguments: Sequence[str]
    launcher: Sequence[str]
    num_workers: int
    folder: Path

    def run_folder(self, bucket_mb: float, repeat: int) -> Path:
        """The folder of a run."""
        return self.folder / f"{bucket_mb:g}mb-{repeat + 1}"

    def command(self, bucket_mb: float, output: Path) -> list[str]:
        """The command of a run, as a list of words."""
        if self.launcher:
            start = [*self.launcher, sys.executable]
        else:
            start = [sys.executable, "-m", "tfdp", "run", "-n", str(self.num_workers)]
            start += ["--log-dir", str(output / "logs")]
        own = ["--bucket-mb", f"{bucket_mb:g}", "--output", str(output)]
        return [*start, self.script, *own, *self.arguments]


def order_of_runs(
    sizes: Sequence[float], num_repeats: int, seed: int = 0
) -> list[tuple[float, int]]:
    """Put the runs in an order in which drift of the machine hurts all sizes alike.

    Every second repeat is a fresh shuffle, and the one after it the same backwards:
    a size that came early then comes late.

    Args:
        sizes: Sequence of floats, bucket sizes in megabytes.
        num_repeats: Int, runs of each size.
        seed: Int. Defaults to `0`.

    Returns:
        List of tuples of size and repeat, from 0 on.

    Example:

    >>> runs = order_of_runs([1, 2, 4], 2)
    >>> [size for size, _ in runs[:3]] == [size for size, _ in runs[:2:-1]]
    True
    """
    generator = random.Random(seed)
    order = list(sizes)
    runs: list[tuple[float, int]] = []
    for repeat in range(num_repeats):
        if repeat % 2 == 0:
            generator.shuffle(order)
        else:
            order.reverse()
        runs += [(size, repeat) for size in order]
    return runs


def run_all(
    study: Study,
    runs: Sequence[tuple[float, int]],
    on_run: Callable[[], None] = lambda: None,
) -> list[Run]:
    """Train once for each of `runs`.

    Args:
        study: `Study`.
        runs: Sequence of tuples of size and repeat, as of `order_of_runs`.
        on_run: Callable, called after each run. Defaults to nothing.

    Returns:
        List of `Run`.

    Raises:
        StudyError: If a run fails or leaves no statistics.
    """
    results = []
    for bucket_mb, repeat in runs:
        output = study.run_folder(bucket_mb, repeat)
        output.mkdir(parents=True)
        _train(study.command(bucket_mb, output), output / _LOG)
        epochs = read_statistics(output / STATISTICS)
        results.append(Run(bucket_mb, repeat, epochs))
        on_run()
    return results


def _train(command: list[str], log: Path) -> None:
    """Run a command to its end, with its output in a file."""
    with log.open("w", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        except OSError as error:
            raise StudyError(
                f"The launcher cannot be started ({error.strerror}). "
                f"Received: {command[0]}"
            ) from error
        try:
            code = process.wait()
        except BaseException:  # Ctrl-C reaches the launcher too; it needs a moment
            _stop(process)
            raise
    if code:
        with log.open(encoding="utf-8", errors="replace") as lines:
            last = "".join(deque(lines, _LAST_LINES))
        raise StudyError(
            f"A training run failed with exit code {code}; its output is in {log} and "
            f"ends with:\n{last.rstrip()}"
        )


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_statistics(path: Path) -> tuple[Epoch, ...]:
    """Read the statistics that a script wrote.

    Args:
        path: Path of a CSV file with a header and a row for each epoch.

    Returns:
        Tuple of `Epoch`.

    Raises:
        StudyError: If there is no such file, or it lacks a column, a row or a
            number.
    """
    if not path.is_file():
        raise StudyError(
            "The script left no statistics: it must take --bucket-mb and --output "
            f"DIR and write DIR/{STATISTICS}, a row for each epoch with the columns "
            f"{', '.join(NEEDED)} (and, as it can, {', '.join(OPTIONAL)}). Received: "
            f"nothing at {path}"
        )
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise StudyError(f"The statistics hold no epoch. Received: {path}")
    return tuple(_epoch(row, path) for row in rows)


def _epoch(row: Mapping[str, str | None], path: Path) -> Epoch:
    values = {name: _number(row.get(name)) for name in (*NEEDED, *OPTIONAL)}
    for name in NEEDED:
        if values[name] is None:
            raise StudyError(
                f"The statistics need a number in the column {name} of each row. "
                f"Received: {row.get(name)!r} in {path}"
            )
    return Epoch(**values)  # type: ignore[arg-type]  # those needed are there


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
