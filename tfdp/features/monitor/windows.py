"""Windows: means over several steps and over workers, and detection of stragglers."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from tfdp.features.monitor.readings import Sample

_PERCENTS = (50, 95, 99)
_PERCENTILES = tuple(f"p{percent}_seconds" for percent in _PERCENTS)
# Columns that are averaged over the steps of a window. Their names are those of fields
# of `Sample`, which are read by name.
_MEANS = (
    "step_seconds",
    "input_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_seconds",
    "sent_bytes",
)
# Columns whose latest value is reported: users want to know the present loss scale, for
# example, and not its mean over the run.
_LATEST = ("gradient_norm", "loss_scale", "skipped_steps")
# `RunTotals` computes percentiles from this many of the latest step times, and medians
# of buckets from this many of the latest windows: a run may have millions of steps.
_KEPT_TIMES, _KEPT_ROWS = 20_000, 1_000
# Fractions of a step by which a worker must be slower than the others to be a
# straggler: the first one in several windows; the larger second one in a single window,
# since a small delay may be chance.
_NOTABLE, _CLEAR = 0.2, 0.5
# A worker must be slow in at least this many windows to be a persistent straggler,
# since it may be slow in a single one by chance.
_SEVERAL = 2


@dataclasses.dataclass(frozen=True)
class Window:
    """Means over several consecutive steps of one worker.

    Args:
        step: Int, the last step, counted from 1 in this run.
        epoch: Int, the epoch of that step.
        mean: `Sample`, means over the steps; its norm is the latest recorded one.
        loss_scale: Float, the loss scale, or NaN without one.
        skipped_steps: Int, steps skipped so far in this run.
        times: List of floats, for each execution the mean seconds of its steps.
    """

    step: int
    epoch: int
    mean: Sample
    loss_scale: float
    skipped_steps: int
    times: list[float]

    def to_json(self) -> str:
        """Encode the window as JSON, to send it to another worker."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Window:
        """Decode the result of `to_json`."""
        content = json.loads(text)
        return cls(**{**content, "mean": Sample(**content["mean"])})


def window_of(
    samples: Sequence[Sample],
    *,
    step: int,
    epoch: int,
    loss_scale: float = math.nan,
    skipped_steps: int = 0,
) -> Window:
    """Combine the samples of a worker into a window.

    Args:
        samples: Sequence of `Sample`, at least one.
        step: Int, number of the last step.
        epoch: Int, epoch of the last step.
        loss_scale: Float, the loss scale, or NaN without one.
        skipped_steps: Int, steps skipped so far in this run.
    """
    times = [sample.step_seconds for sample in samples]
    return Window(step, epoch, mean_of(samples), loss_scale, skipped_steps, times)


def mean_of(samples: Sequence[Sample]) -> Sample:
    """Average several samples into one, which represents the steps of all.

    Args:
        samples: Sequence of `Sample`, at least one.
    """
    norms = [s.squared_norm for s in samples if not math.isnan(s.squared_norm)]
    labels = {label: None for sample in samples for label in sample.buckets}
    return Sample(
        num_steps=sum(s.num_steps for s in samples),
        squared_norm=norms[-1] if norms else math.nan,
        buckets={
            label: _mean([s.buckets[label] for s in samples if label in s.buckets])
            for label in labels
        },
        **{
            name: _mean([getattr(sample, name) for sample in samples])
            for name in (*_MEANS, "samples")
        },
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A window of the whole cluster: means over the workers.

    Args:
        step: Int, the last step of the window.
        epoch: Int, the epoch of that step.
        values: Dict from the name of a column to its value.
        buckets: Dict from the label of a collective to seconds on the first worker.
        times: List of floats, the seconds of each step of the first worker.
        workers: Dict from rank to `Window`, without workers that did not report it.
    """

    step: int
    epoch: int
    values: dict[str, float]
    buckets: dict[str, float]
    times: list[float]
    workers: dict[int, Window]

    @property
    def num_steps(self) -> int:
        """Int, number of steps of the window that worker 0 has timed."""
        return self.workers[0].mean.num_steps

    def waits(self) -> dict[int, float]:
        """Return the seconds that each worker waited for others, by rank.

        All workers run the same collectives. So the worker with the least exposed
        communication did not wait, and the others waited for the difference.
        """
        exposed = {r: w.mean.exposed_seconds for r, w in self.workers.items()}
        least = min(exposed.values())
        return {rank: seconds - least for rank, seconds in exposed.items()}


def merge(windows: dict[int, Window], num_workers: int) -> Row:
    """Merge the windows of the workers into a row.

    Mean times of a step are over the workers in `windows`, and the gradient's norm is
    over all workers. Values that cannot be merged, such as percentiles, are worker 0's.

    Args:
        windows: Dict from rank to `Window`, with rank 0; others may be missing.
        num_workers: Int, number of all workers; if some are missing, the norm is NaN.
    """
    first = windows[0]
    parts = [window.mean for window in windows.values()]
    means = {name: _mean([getattr(p, name) for p in parts]) for name in _MEANS}
    means["sent_bytes"] = first.mean.sent_bytes
    is_whole = len(parts) == num_workers
    squares = sum(p.squared_norm for p in parts) if is_whole else math.nan
    return Row(
        step=first.step,
        epoch=first.epoch,
        values={
            **_with_derived_columns(means, first.times),
            "samples_per_second": first.mean.samples / means["step_seconds"],
            "gradient_norm": math.sqrt(squares) if squares >= 0 else math.nan,
            "loss_scale": first.loss_scale,
            "skipped_steps": first.skipped_steps,
        },
        buckets=first.mean.buckets,
        times=first.times,
        workers=windows,
    )


def fraction(communication: float, compute: float) -> float:
    """Return the communication fraction, s = T_comm / (T_comp + T_comm).

    Args:
        communication: Float, seconds of communication.
        compute: Float, seconds of computing.

    Example:

    >>> fraction(1.0, 3.0)
    0.25
    """
    total = communication + compute
    return communication / total if total else 0.0


class WeightedMean:
    """Running weighted mean of numbers; NaN is left out.

    Example:

    >>> mean = WeightedMean()
    >>> mean.add(1.0, 3)
    >>> mean.add(5.0, 1)
    >>> mean.value
    2.0
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float, weight: float) -> None:
        """Add a number with its weight, unless the number is NaN."""
        if not math.isnan(value):
            self._sum += value * weight
            self._weight += weight

    @property
    def value(self) -> float:
        """Float, the mean; NaN before the first number."""
        return self._sum / self._weight if self._weight else math.nan


class RunTotals:
    """Mean of each column of the windows of a run, weighted by their steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._latest: dict[str, float] = {}
        # Running mean of each column, by the rank of a worker, or `None` for all
        # workers: rows are not stored, since a run may have millions.
        self._means: collections.defaultdict[tuple[int | None, str], WeightedMean]
        self._means = collections.defaultdict(WeightedMean)
        self._buckets: dict[str, collections.deque[float]] = {}
        self._times: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)

    def add(self, row: Row) -> None:
        """Add a row, which is a window of all workers, to the totals."""
        count, values = row.num_steps, row.values
        self.num_steps += count
        self._times.extend(row.times)
        for name in _LATEST:
            if name not in self._latest or not math.isnan(values[name]):
                self._latest[name] = values[name]
        for name in _MEANS:
            self._means[None, name].add(values[name], count)
        # The speed is weighted by time, not by steps: only then is its mean the number
        # of all samples divided by all seconds.
        speed = "samples_per_second"
        self._means[None, speed].add(values[speed], count * values["step_seconds"])
        for label, seconds in row.buckets.items():
            kept = self._buckets.setdefault(label, collections.deque(maxlen=_KEPT_ROWS))
            kept.append(seconds)
        for rank, wait in row.waits().items():
            mean = row.workers[rank].mean
            self._means[rank, "step_seconds"].add(mean.step_seconds, count)
            self._means[rank, "compute_seconds"].add(mean.compute_seconds, count)
            self._means[rank, "wait_seconds"].add(wait, count)

    @property
    def values(self) -> dict[str, float]:
        """Dict from a column to its mean over the run, or for some its latest value.

        The latest values are those of `gradient_norm`, `loss_scale` and
        `skipped_steps`. Percentiles are of the latest step times.
        """
        return {
            **_with_derived_columns(self._means_of(None), list(self._times)),
            **self._latest,
        }

    @property
    def buckets(self) -> dict[str, float]:
        """Dict from the label of a collective to its median seconds.

        The median is that of its times in the last 1,000 rows, on the first worker.
        """
        return {k: float(np.median(seconds)) for k, seconds in self._buckets.items()}

    @property
    def workers(self) -> dict[int, dict[str, float]]:
        """Dict from rank to the means of a worker, by column."""
        ranks = sorted({rank for rank, _ in self._means if rank is not None})
        return {rank: self._means_of(rank) for rank in ranks}

    def _means_of(self, wanted_rank: int | None) -> dict[str, float]:
        """Return the means by column, of one worker, or with `None` of all workers."""
        return {
            name: mean.value
            for (rank, name), mean in self._means.items()
            if rank == wanted_rank
        }


def _with_derived_columns(
    means: dict[str, float], times: Sequence[float]
) -> dict[str, float]:
    """Return means with percentiles of step times and columns computed from means.

    The percentiles are the columns `p50_seconds`, `p95_seconds` and `p99_seconds`. The
    others are `communication_fraction` and `busbw_gb_per_second`.

    Args:
        means: Dict from a column of `_MEANS` to its mean.
        times: Sequence of floats, the seconds of each step.
    """
    busy = means["communication_seconds"]
    percentiles = map(float, np.percentile(times, _PERCENTS))
    return {
        **means,
        **dict(zip(_PERCENTILES, percentiles, strict=True)),
        "communication_fraction": fraction(busy, means["compute_seconds"]),
        "busbw_gb_per_second": means["sent_bytes"] / busy / 1e9 if busy else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN, or NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The worker that the others wait for.

    Args:
        rank: Int, rank of the worker.
        host: String, host of the worker.
        seconds: Float, time per step by which it is slower than the median of others.
        before_data_seconds: Float, part of that time in which it waits for its data.
            Defaults to 0.
    """

    rank: int
    host: str
    seconds: float
    before_data_seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"worker {self.rank} on {self.host} takes {1000 * self.seconds:.0f} ms "
            "longer than the others for its own part of each step"
        )

    @property
    def remedy(self) -> str:
        """String, clauses that recommend to the user what to do about the worker."""
        others = (
            "`tfdp run --rebalance` gives it fewer rows; or train without that host"
        )
        if self.before_data_seconds > self.seconds / 2:
            return (
                "it waits for its data, so give its input pipeline more threads, a "
                f"prefetch or a faster disk, and look at its callbacks; {others}"
            )
        return (
            "look at what else runs on its host, at its clock rate and at its "
            f"temperature; {others}"
        )


@dataclasses.dataclass(frozen=True)
class SlowestWorker:
    """The slowest worker of a window.

    Args:
        rank: Int, rank of the worker.
        seconds: Float, time per step by which it is slower than the median of others.
        before_data_seconds: Float, part of that time in which it waits for its data.
        step_fraction: Float, `seconds` as a fraction of a step.
        num_steps: Int, steps of the window.
    """

    rank: int
    seconds: float
    before_data_seconds: float
    step_fraction: float
    num_steps: int


def slowest_worker(row: Row) -> SlowestWorker | None:
    """Find the slowest worker of a window: the one with most `compute_seconds` a step.

    Args:
        row: `Row` of the window.

    Returns:
        `SlowestWorker`, or `None` if only one worker has reported the window.
    """
    if len(row.workers) < 2:
        return None
    computes = {r: w.mean.compute_seconds for r, w in row.workers.items()}
    rank = max(computes, key=computes.__getitem__)
    seconds = _above_others(computes, rank)
    inputs = {r: w.mean.input_seconds for r, w in row.workers.items()}
    step = row.values["step_seconds"]
    fraction = seconds / step if step else 0.0
    return SlowestWorker(
        rank, seconds, _above_others(inputs, rank), fraction, row.num_steps
    )


def find_straggler(rows: Sequence[Row], hosts: Sequence[str]) -> Straggler | None:
    """Find a worker that delays the others in the last windows; `None` without one.

    One window suffices if the worker is slower by half of a step; otherwise it must be
    the slowest, by a fifth of a step, in the last two windows.

    Args:
        rows: Sequence of `Row`, the latest last.
        hosts: Sequence of strings, the host of each worker.
    """
    slowest = [w for w in map(slowest_worker, rows[-2:]) if w is not None]
    if not slowest:
        return None
    last = slowest[-1]
    same = [w for w in slowest if w.rank == last.rank]
    notable = [w for w in same if w.step_fraction >= _NOTABLE]
    if last.step_fraction >= _CLEAR or len(notable) == 2:
        return _straggler_of([last], hosts)
    return None


def persistent_straggler(
    windows: Sequence[SlowestWorker], hosts: Sequence[str]
) -> Straggler | None:
    """Find a worker that delays the others persistently; `None` without one.

    It is the slowest, by a fifth of a step or more, in at least half of the steps and
    in more than one window.

    Args:
        windows: Sequence of `SlowestWorker`, the slowest worker of each window.
        hosts: Sequence of strings, the host of each worker.

    Example:

    >>> slow = SlowestWorker(1, 0.5, 0.0, 0.4, 10)
    >>> even = SlowestWorker(0, 0.01, 0.0, 0.01, 10)
    >>> persistent_straggler([slow, even, slow, even], ["a", "b"]).rank
    1
    >>> persistent_straggler([slow, even], ["a", "b"]) is None
    True
    """
    num_steps = sum(window.num_steps for window in windows)
    for rank in {window.rank for window in windows}:
        slow = [w for w in windows if w.rank == rank and w.step_fraction >= _NOTABLE]
        slow_steps = sum(window.num_steps for window in slow)
        if len(slow) >= _SEVERAL and 2 * slow_steps >= num_steps:
            return _straggler_of(slow, hosts)
    return None


def _straggler_of(windows: Sequence[SlowestWorker], hosts: Sequence[str]) -> Straggler:
    """Average the windows in which one worker is the slowest into a `Straggler`.

    Args:
        windows: Sequence of `SlowestWorker` of the same rank, at least one.
        hosts: Sequence of strings, the host of each worker.
    """
    rank = windows[0].rank
    count = sum(window.num_steps for window in windows)
    seconds = sum(w.seconds * w.num_steps for w in windows) / count
    before_data = sum(w.before_data_seconds * w.num_steps for w in windows) / count
    return Straggler(rank, hosts[rank], seconds, before_data)


def _above_others(seconds: Mapping[int, float], rank: int) -> float:
    """Return by how many seconds a worker's time exceeds the median of the others.

    Args:
        seconds: Mapping from rank to a time.
        rank: Int, rank of the worker.
    """
    others = [value for key, value in seconds.items() if key != rank]
    return seconds[rank] - statistics.median(others)
