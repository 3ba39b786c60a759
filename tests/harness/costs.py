"""`--costs=FILE`: what each test costs, in seconds and in seconds of processors.

Seconds of processors are the measure to cut by: they depend little on what else the
machine does. Those of cases are counted where they run, which is in workers that go
ahead of the tests.
"""

from __future__ import annotations

import collections
import collections.abc
import pathlib
import resource
import time

import pytest

from tests.harness.groups import params_of
from tests.harness.pool import ClusterPool

POOL = pytest.StashKey[ClusterPool]()
_NAME = "cpu_seconds"


class Costs:
    """A table of all tests, the dearest first.

    Args:
        path: Where to write it, or `None` in a process of pytest-xdist, whose reports
            go to the one that started it.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path = path
        self._so_far = _own_seconds()
        self._rows: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> collections.abc.Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds to the report of each phase what it has cost since the one before."""
        report = yield
        before, self._so_far = self._so_far, _own_seconds()
        spent = self._so_far - before + _seconds_of_case(item)
        report.user_properties.append((_NAME, spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase to the row of its test."""
        row = self._rows[report.nodeid]
        row[0] += dict(report.user_properties).get(_NAME, 0.0)
        row[1] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the table."""
        if self._path is None:
            return
        rows = sorted(self._rows.items(), key=lambda row: -row[1][0])
        totals = [sum(row[part] for _, row in rows) for part in (0, 1)]
        lines = ["processors  seconds  test"]
        for name, (cpu, wall) in [("all", totals), *rows]:
            lines.append(f"{cpu:10.2f} {wall:8.2f}  {name}")
        self._path.write_text("\n".join(lines) + "\n", "utf-8")


def _own_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _seconds_of_case(item: pytest.Item) -> float:
    pool = item.config.stash.get(POOL, None)
    case = params_of(item).get("case")
    if pool is None or case is None:
        return 0.0
    keys = [key for key in pool.costs if key[0] == case.name]
    return sum(pool.costs.pop(key) for key in keys)
