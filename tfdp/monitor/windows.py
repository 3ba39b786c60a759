"""Several steps as one: of a worker, and of all workers together."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np

from tfdp.monitor.readings import Sample

_PERCENTS = (50, 95, 99)
_PERCENTILES = ("p50_seconds", "p95_seconds", "p99_seconds")
_MEANS = (
    "step_seconds",
    "input_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_seconds",
    "bytes_sent",
)
_LATEST = ("gradient_norm", "loss_scale", "skipped_steps")
# Enough for percentiles; a run may have millions of steps.
_KEPT_TIMES, _KEPT_ROWS = 20_000, 1_000


@dataclasses.dataclass(frozen=True)
class Window:
    """A few consecutive steps of one worker: means, but for the last four.

    Args:
        step: Int, the last step, counted from 1 in this run.
        epoch: Int.
        num_steps: Int, that were timed.
        step_seconds: Float.
        input_seconds: Float.
        compute_seconds: Float.
        communication_seconds: Float.
        exposed_seconds: Float.
        bytes_sent: Float, by each replica in a step.
        samples: Float, of the global batch; NaN where unknown.
        buckets: Dict from label to seconds.
        squared_norm: Float, this worker's part at the last step that noted it.
        loss_scale: Float, or NaN without one.
        skipped_steps: Int, so far.
        times: List of floats, the seconds of a step in each execution.
    """

    step: int
    epoch: int
    num_steps: int
    step_seconds: float
    input_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    bytes_sent: float
    samples: float
    buckets: dict[str, float]
    squared_norm: float
    loss_scale: float
    skipped_steps: int
    times: list[float]

    def to_json(self) -> str:
        """A text, for other workers."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Window:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


def window_of(
    samples: Sequence[Sample],
    *,
    step: int,
    epoch: int,
    loss_scale: float = math.nan,
    skipped_steps: int = 0,
) -> Window:
    """Puts the samples of a worker together.

    Args:
        samples: Sequence of `Sample`, at least one.
        step: Int, the last one's number.
        epoch: Int.
        loss_scale: Float, or NaN without one.
        skipped_steps: Int, so far.
    """
    norms = [s.squared_norm for s in samples if not math.isnan(s.squared_norm)]
    labels = {label: None for sample in samples for label in sample.buckets}
    return Window(
        step=step,
        epoch=epoch,
        num_steps=sum(s.num_steps for s in samples),
        step_seconds=_mean([s.step_seconds for s in samples]),
        input_seconds=_mean([s.input_seconds for s in samples]),
        compute_seconds=_mean([s.compute_seconds for s in samples]),
        communication_seconds=_mean([s.communication_seconds for s in samples]),
        exposed_seconds=_mean([s.exposed_seconds for s in samples]),
        bytes_sent=_mean([s.bytes_sent for s in samples]),
        samples=_mean([s.samples for s in samples]),
        buckets={
            label: _mean([s.buckets[label] for s in samples if label in s.buckets])
            for label in labels
        },
        squared_norm=norms[-1] if norms else math.nan,
        loss_scale=loss_scale,
        skipped_steps=skipped_steps,
        times=[s.step_seconds for s in samples],
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

    def waits(self) -> dict[int, float]:
        """Seconds that each worker waited for others, by its rank.

        All have the same collectives: what one is in longer than another is time in
        which it waited.
        """
        exposed = {rank: w.exposed_seconds for rank, w in self.workers.items()}
        least = min(exposed.values())
        return {rank: seconds - least for rank, seconds in exposed.items()}


def merge(windows: dict[int, Window], num_workers: int) -> Row:
    """Puts the windows of the workers together.

    Args:
        windows: Dict from rank to `Window`; rank 0 is there.
        num_workers: Int, of which some may be silent.
    """
    own = windows[0]
    every = list(windows.values())
    percentiles = np.percentile(own.times, _PERCENTS)
    step = _mean([w.step_seconds for w in every])
    compute = _mean([w.compute_seconds for w in every])
    communication = _mean([w.communication_seconds for w in every])
    is_whole = len(every) == num_workers
    squares = sum(w.squared_norm for w in every) if is_whole else math.nan
    return Row(
        step=own.step,
        epoch=own.epoch,
        values={
            "step_seconds": step,
            **dict(zip(_PERCENTILES, map(float, percentiles), strict=True)),
            "samples_per_second": own.samples / step,
            "input_seconds": _mean([w.input_seconds for w in every]),
            "compute_seconds": compute,
            "communication_seconds": communication,
            "exposed_seconds": _mean([w.exposed_seconds for w in every]),
            "communication_fraction": fraction(communication, compute),
            "bytes_sent": own.bytes_sent,
            "busbw_bytes_per_second": (
                own.bytes_sent / communication if communication else 0.0
            ),
            "gradient_norm": math.sqrt(squares) if squares >= 0 else math.nan,
            "loss_scale": own.loss_scale,
            "skipped_steps": own.skipped_steps,
        },
        buckets=own.buckets,
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
        """Takes in a number."""
        if not math.isnan(value):
            self._sum += value * weight
            self._weight += weight

    @property
    def value(self) -> float:
        """Float, NaN before the first number."""
        return self._sum / self._weight if self._weight else math.nan


Means = collections.defaultdict[str, WeightedMean]


class Totals:
    """What a run was like: means over its rows, weighted by their steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._latest: dict[str, float] = {}
        self._means: Means = collections.defaultdict(WeightedMean)
        self._workers: dict[int, Means] = {}
        self._buckets: dict[str, collections.deque[float]] = {}
        self._times: collections.deque[float] = collections.deque(maxlen=_KEPT_TIMES)

    def add(self, row: Row) -> None:
        """Takes in a row."""
        count = row.workers[0].num_steps
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
            means["step_seconds"].add(row.workers[rank].step_seconds, count)
            means["compute_seconds"].add(row.workers[rank].compute_seconds, count)
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
        found["busbw_bytes_per_second"] = found["bytes_sent"] / busy if busy else 0.0
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


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
