"""`--costs=FILE`: what each test costs, in seconds and in seconds of processors.

Seconds of processors are the measure to cut by: they depend little on what else the
machine does. Those of cases are counted where they run, which is in workers that go
ahead of the tests; those of other forks once they have ended.
"""

from __future__ import annotations

import collections
import collections.abc
import multiprocessing.forkserver
import pathlib
import resource
import time

import psutil
import pytest

from tests.harness.groups import CLUSTERS, params_of
from tests.harness.pool import ClusterPool

POOL = pytest.StashKey[ClusterPool]()
_NAME, _COLLECTING = "cpu_seconds", "cpu_seconds_of_collecting"


class Costs:
    """A table of all tests, the dearest first.

    Args:
        path: Where to write it, or `None` in a process of pytest-xdist, whose reports
            go to the one that started it.
    """

    def __init__(self, path: pathlib.Path | None):
        self._path = path
        self._so_far = self._of_collecting = 0.0
        self._of_forks = 0.0
        self._rows: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        """Keeps what this process has cost so far from being that of its first test."""
        self._so_far = self._of_collecting = _own_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> collections.abc.Generator[None, pytest.TestReport, pytest.TestReport]:
        """Adds to the report of each phase what it has cost since the one before."""
        report = yield
        before, self._so_far = self._so_far, _own_seconds()
        spent = self._so_far - before + _seconds_of_case(item)
        before, self._of_forks = self._of_forks, _seconds_of_forks()
        # The last teardown ends the workers of cases.
        ends_clusters = call.when == "teardown" and POOL in item.config.stash
        if CLUSTERS not in item.fixturenames and not ends_clusters:
            spent += self._of_forks - before
        report.user_properties.append((_NAME, spent))
        report.user_properties.append((_COLLECTING, self._of_collecting))
        self._of_collecting = 0.0
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds a phase to the row of its test."""
        row, costs = self._rows[report.nodeid], dict(report.user_properties)
        row[0] += costs.get(_NAME, 0.0)
        row[1] += report.duration
        self._rows["starting and collecting"][0] += costs.get(_COLLECTING, 0.0)

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


def _seconds_of_forks() -> float:
    """Of those that the fork server has reaped, workers of clusters among them."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.children_user + times.children_system


def _seconds_of_case(item: pytest.Item) -> float:
    pool = item.config.stash.get(POOL, None)
    case = params_of(item).get("case")
    if pool is None or case is None:
        return 0.0
    keys = [key for key in pool.costs if key[0] == case.name]
    return sum(pool.costs.pop(key) for key in keys)
