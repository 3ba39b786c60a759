"""Arguments and report of a benchmark: figures with their goals, shown and kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdp.launch.bench.machine import describe, load
from tfdp.launch.bench.stats import Ratio

PROGRAM = "python -m tools.bench"


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
