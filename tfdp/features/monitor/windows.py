"""Windows: means over several steps of a worker, and of all workers together."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from tfdp.features.monitor.readings import Sample

_PERCENTS = (50, 95, 99)
_PERCENTILES = ("p50_seconds", "p95_seconds", "p99_seconds")
_MEANS = (
    "step_seconds",
    "input_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_seconds",
    "sent_bytes",
)
_LATEST = ("gradient_norm", "loss_scale", "skipped_steps")
# Enough for percentiles; a run may have millions of steps.
_KEPT_TIMES, _KEPT_ROWS = 20_000, 1_000


@dataclasses.dataclass(frozen=True)
class Window:
    """A few consecutive steps of one worker.

    Args:
        step: Int, the last step, counted from 1 in this run.
        epoch: Int.
        mean: `Sample`, means over the steps; its norm is the latest that was noted.
        loss_scale: Float, or NaN without one.
        skipped_steps: Int, so far.
        times: List of floats, the seconds of a step in each execution.
    """

    step: int
    epoch: int
    mean: Sample
    loss_scale: float
    skipped_steps: int
    times: list[float]

    def to_json(self) -> str:
        """A text, for other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Window:
        """The inverse of `to_json`."""
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
    """Put the samples of a worker together.

    Args:
        samples: Sequence of `Sample`, at least one.
        step: Int, the last one's number.
        epoch: Int.
        loss_scale: Float, or NaN without one.
        skipped_steps: Int, so far.
    """
    times = [sample.step_seconds for sample in samples]
    return Window(step, epoch, mean_of(samples), loss_scale, skipped_steps, times)


def mean_of(samples: Sequence[Sample]) -> Sample:
    """Several samples as one, which stands for the steps of all.

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
        step: Int.
        epoch: Int.
        values: Dict from the name of a column to a number.
        buckets: Dict from label to seconds.
        times: List of floats, the seconds of each step of the first worker.
        workers: Dict from rank to its `Window`; those that were silent are missing.
    """

    step: int
    epoch: int
    values: dict[str, float]
    buckets: dict[str, float]
    times: list[float]
    workers: dict[int, Window]

    @property
    def num_steps(self) -> int:
        """Int, that were timed."""
        return self.workers[0].mean.num_steps

    def waits(self) -> dict[int, float]:
        """Seconds that each worker waited for others, by its rank.

        All have the same collectives: what one is in longer than another is time in
        which it waited.
        """
        exposed = {r: w.mean.exposed_seconds for r, w in self.workers.items()}
        least = min(exposed.values())
        return {rank: seconds - least for rank, seconds in exposed.items()}


def merge(windows: dict[int, Window], num_workers: int) -> Row:
    """Put the windows of the workers together.

    Args:
        windows: Dict from rank to `Window`; rank 0 is there.
        num_workers: Int, of which some may be silent.
    """
    own = windows[0]
    parts = [window.mean for window in windows.values()]
    means = {name: _mean([getattr(p, name) for p in parts]) for name in _MEANS}
    means["sent_bytes"] = own.mean.sent_bytes
    busy = means["communication_seconds"]
    is_whole = len(parts) == num_workers
    squares = sum(p.squared_norm for p in parts) if is_whole else math.nan
    percentiles = map(float, np.percentile(own.times, _PERCENTS))
    return Row(
        step=own.step,
        epoch=own.epoch,
        values={
            **means,
            **dict(zip(_PERCENTILES, percentiles, strict=True)),
            "samples_per_second": own.mean.samples / means["step_seconds"],
            "communication_fraction": fraction(busy, means["compute_seconds"]),
            "busbw_gb_per_second": _gb_per_second(means["sent_bytes"], busy),
            "gradient_norm": math.sqrt(squares) if squares >= 0 else math.nan,
            "loss_scale": own.loss_scale,
            "skipped_steps": own.skipped_steps,
        },
        buckets=own.mean.buckets,
        times=own.times,
        workers=windows,
    )


def fraction(communication: float, compute: float) -> float:
    """The communication fraction: s = T_comm / (T_comp + T_comm).

    Example:

    >>> fraction(1.0, 3.0)
    0.25
    """
    total = communication + compute
    return communication / total if total else 0.0


class WeightedMean:
    """A mean of numbers that come one after the other; NaN is left out.

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
        """Take in a number."""
        if not math.isnan(value):
            self._sum += value * weight
            self._weight += weight

    @property
    def value(self) -> float:
        """Float, NaN before the first number."""
        return self._sum / self._weight if self._weight else math.nan


Means = collections.defaultdict[str, WeightedMean]


class Totals:
    """Totals of a run: means over its rows, weighted by their steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._latest: dict[str, float] = {}
        self._means: Means = collections.defaultdict(WeightedMean)
        self._workers: dict[int, Means] = {}
        self._buckets: dict[str, collections.deque[float]] = {}
        self._times: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)

    def add(self, row: Row) -> None:
        """Take in a row."""
        count = row.num_steps
        self.num_steps += count
        self._times.extend(row.times)
        for name in _LATEST:
            if name not in self._latest or not math.isnan(row.values[name]):
                self._latest[name] = row.values[name]
        for name in _MEANS:
            self._means[name].add(row.values[name], count)
        # Samples of slow and of fast windows count alike, and so do seconds.
        speed = row.values["samples_per_second"]
        self._means["speed"].add(speed, count * row.values["step_seconds"])
        for label, seconds in row.buckets.items():
            kept = self._buckets.setdefault(label, collections.deque(maxlen=_KEPT_ROWS))
            kept.append(seconds)
        for rank, wait in row.waits().items():
            means = self._workers.setdefault(
                rank, collections.defaultdict(WeightedMean)
            )
            means["step_seconds"].add(row.workers[rank].mean.step_seconds, count)
            means["compute_seconds"].add(row.workers[rank].mean.compute_seconds, count)
            means["wait_seconds"].add(wait, count)

    @property
    def values(self) -> dict[str, float]:
        """Dict from the name of a column to its mean; the last three are the latest."""
        found = {name: self._means[name].value for name in _MEANS}
        found["samples_per_second"] = self._means["speed"].value
        percentiles = np.percentile(list(self._times), _PERCENTS)
        for name, value in zip(_PERCENTILES, percentiles, strict=True):
            found[name] = float(value)
        busy, compute = found["communication_seconds"], found["compute_seconds"]
        found["communication_fraction"] = fraction(busy, compute)
        found["busbw_gb_per_second"] = _gb_per_second(found["sent_bytes"], busy)
        return {**found, **self._latest}

    @property
    def buckets(self) -> dict[str, float]:
        """Dict from label to the median of its seconds."""
        return {k: float(np.median(seconds)) for k, seconds in self._buckets.items()}

    @property
    def workers(self) -> dict[int, dict[str, float]]:
        """Dict from rank to the means of a worker."""
        return {
            rank: {name: mean.value for name, mean in means.items()}
            for rank, means in sorted(self._workers.items())
        }


def _gb_per_second(num_bytes: float, seconds: float) -> float:
    return num_bytes / seconds / 1e9 if seconds else 0.0


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
