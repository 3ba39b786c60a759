"""Arguments and report of a benchmark: figures with their goals, shown and kept."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdp.ground.text import pluralize
from tfdp.launch.bench.machine import describe, load
from tfdp.launch.bench.sides import Ratio, paired_ratio

PROGRAM = "python -m tools.bench"
SCALINGS = ("weak", "strong")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Options of a benchmark; each reads those that its command has.

    Args:
        out: Path of the JSON file, or `None` for none.
        blocks: Int, turns of each side.
        models: Sequence of strings, of `tools.bench.models`.
        torch_python: String, an interpreter that may have PyTorch.
        rates: Sequence of strings, of the link between two hosts.
        workers_per_host: Sequence of ints.
        megabytes: Int, size of the gradients.
        batch: Int, samples of each worker.
    """

    out: Path | None
    blocks: int
    models: Sequence[str] = ()
    torch_python: str = ""
    rates: Sequence[str] = ()
    workers_per_host: Sequence[int] = ()
    megabytes: int = 0
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number and what it should be.

    Args:
        name: String, what is compared with what.
        value: `Ratio` or float.
        at_least: Float or `None`, the goal.
        at_most: Float or `None`, the goal.
        note: String, what else to know. Defaults to none.
    """

    name: str
    value: Ratio | float
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def goal(self) -> str:
        """The goal in words."""
        if None not in (self.at_least, self.at_most):
            return f"goal {self.at_least:g} to {self.at_most:g}"
        if self.at_least is not None:
            return f"goal >= {self.at_least:g}"
        return "" if self.at_most is None else f"goal <= {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        """Bool, true if the median meets the goal; `None` without a goal."""
        if self.at_least is None and self.at_most is None:
            return None
        median = self.value.median if isinstance(self.value, Ratio) else self.value
        is_enough = self.at_least is None or median >= self.at_least
        return is_enough and (self.at_most is None or median <= self.at_most)

    def __str__(self) -> str:
        verdict = {None: "", True: "met", False: "MISSED"}[self.met]
        value = self.value
        shown = str(value) if isinstance(value, Ratio) else f"{value:g}"
        words = [f"{self.name}: {shown}", self.goal, verdict, self.note]
        return "  ".join(word for word in words if word)


class Report:
    """Figures of a run.

    Args:
        args: The command line; `out` is where the JSON goes.
        setting: Mapping, the model, the batch and the like.
    """

    def __init__(self, args: Arguments, setting: Mapping[str, Any]) -> None:
        self._out: Path | None = args.out
        self._content: dict[str, Any] = {**describe(PROGRAM), **setting, "figures": []}
        for name, value in self._content.items():
            if name != "figures":
                print(f"{name}: {value}")
        print(flush=True)

    def add(self, figure: Figure) -> None:
        """Print a figure and keeps it."""
        print(figure, flush=True)
        kept = dataclasses.asdict(figure)
        self._content["figures"].append({**kept, "met": figure.met})

    def keep(self, name: str, key: str, value: Any) -> None:
        """Keep a value beside others of its kind, without printing it.

        Args:
            name: String, of the kind.
            key: String, of the value.
            value: What JSON can hold.
        """
        self._content.setdefault(name, {})[key] = value

    def add_times(self, times: Mapping[str, Sequence[float]]) -> None:
        """Keep the raw times, in seconds, and print their medians."""
        self._content.setdefault("seconds_per_step", {}).update(times)
        for name, values in times.items():
            middle = sorted(values)[len(values) // 2]
            best = min(values)
            print(f"  {name}: median {middle * 1e3:.2f} ms, best {best * 1e3:.2f} ms")

    def finish(self) -> None:
        """Write the JSON, if asked to."""
        self._content["load_average_at_end"] = load()
        if self._out:
            self._out.write_text(json.dumps(self._content, indent=1) + "\n", "utf-8")


def ratio_to_best(rivals: Sequence[Sequence[float]], own: Sequence[float]) -> Ratio:
    """Compare with the fastest of several rivals.

    Every other block chooses it and the rest are compared: the best of several
    noisy medians would look faster than it is.
    """
    best = min(rivals, key=lambda times: statistics.median(times[::2]))
    return paired_ratio(best[1::2], own[1::2])


def efficiency(
    scaling: str, alone: Sequence[float], together: Sequence[float], num_replicas: int
) -> Ratio:
    """Scaling efficiency: the fraction of N times one replica's speed that N reach.

    Weak scaling, where each replica keeps its batch: T(1) / T(N). Strong scaling,
    where all share one global batch: T(1) / (N T(N)).

    Args:
        scaling: String, `"weak"` or `"strong"`.
        alone: Sequence of floats, seconds of a step on one replica, block by block.
        together: Sequence of floats, the same of N replicas.
        num_replicas: Int, N.

    Returns:
        A `Ratio`.

    Raises:
        ValueError: If there is no such scaling.

    Example:

    >>> efficiency("strong", [8.0], [5.0], 2).median
    0.8

    Source: Amdahl 1967, "Validity of the single processor approach to achieving
    large scale computing capabilities", for strong scaling; Gustafson 1988,
    "Reevaluating Amdahl's law", for weak; Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, figure 7, for weak scaling of training.
    """
    if scaling not in SCALINGS:
        raise ValueError(
            f"The scaling must be one of {SCALINGS}. Received: {scaling!r}"
        )
    ratio = paired_ratio(alone, together)
    return ratio if scaling == "weak" else ratio.times(1 / num_replicas)


def speedup(efficiency: Ratio, num_replicas: int) -> Ratio:
    """Speedup over one replica: N times the efficiency.

    Args:
        efficiency: `Ratio`.
        num_replicas: Int, N.

    Returns:
        A `Ratio`.

    Example:

    >>> speedup(Ratio(0.5, 0.5, 0.5, 1), 4).median
    2.0
    """
    return efficiency.times(num_replicas)


def batch_of(scaling: str, batch_size: int, num_replicas: int, most: int) -> int:
    """The batch of each replica.

    Args:
        scaling: String, `"weak"` or `"strong"`.
        batch_size: Int, samples of each replica in weak scaling, and in strong
            scaling of each of the largest number of replicas.
        num_replicas: Int, N.
        most: Int, the largest number of replicas.

    Returns:
        Int.

    Raises:
        ValueError: If the global batch does not divide.

    Example:

    >>> [batch_of("strong", 32, n, 4) for n in (1, 2, 4)]
    [128, 64, 32]
    """
    if scaling == "weak":
        return batch_size
    total = batch_size * most
    if total % num_replicas:
        raise ValueError(
            "The global batch of strong scaling, that of the largest number of "
            "replicas, must divide by each number. Received: "
            f"{pluralize(total, 'sample')} on {pluralize(num_replicas, 'replica')}"
        )
    return total // num_replicas
