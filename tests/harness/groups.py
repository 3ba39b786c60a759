"""Which tests share a process of pytest-xdist, and in which order all are run."""

from __future__ import annotations

import ast
import functools
import itertools
import pathlib
from collections.abc import Mapping

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTERS = "clusters"
NAMED = "PROCESS_GROUP"
_SLOW_SECONDS = 2.0


def params_of(item: pytest.Item) -> dict:
    """The parameters of a test."""
    return getattr(getattr(item, "callspec", None), "params", {})


def group_of(nodeid: str) -> str:
    """The name of a test's group: the tests that share clusters, or those of a file.

    Files that must not run beside each other name one group in `PROCESS_GROUP`.
    """
    path, _, test = nodeid.partition("::")
    if test.partition("[")[0] in _users_of_clusters(path):
        return CLUSTERS
    return _named_group(path) or path


def order(items: list[pytest.Item]) -> None:
    """Sorts: first what shares clusters, then slow groups with quick ones among them.

    So the slowest groups begin early, and the share of tests that have ended grows
    evenly. In each group what must run alone is last.
    """
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid), []).append(item)
    clusters = groups.pop(CLUSTERS, [])
    slow = {name: time for name in groups if (time := _slow_seconds(groups[name]))}
    quick = {name: len(groups[name]) for name in groups if name not in slow}
    slowest_first = dict(sorted(slow.items(), key=lambda group: -group[1]))
    places = _shares(slowest_first) | _shares(quick)
    names = sorted(groups, key=places.__getitem__)
    items[:] = [*_alone_last(clusters)]
    for name in names:
        items.extend(_alone_last(groups[name]))


def _slow_seconds(group: list[pytest.Item]) -> float:
    """About how long the slow tests of a group take; one may say it: `seconds=`."""
    marks = [
        item.get_closest_marker("slow") or item.get_closest_marker("processes")
        for item in group
    ]
    return sum(mark.kwargs.get("seconds", _SLOW_SECONDS) for mark in marks if mark)


def _shares(sizes: Mapping[str, float]) -> dict[str, float]:
    """The share of the sum of all sizes that comes before the middle of each group."""
    ends = itertools.accumulate(sizes.values())
    total = sum(sizes.values())
    return {
        name: (end - size / 2) / total
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def _alone_last(group: list[pytest.Item]) -> list[pytest.Item]:
    return sorted(
        group,
        key=lambda item: not getattr(params_of(item).get("case"), "side_by_side", True),
    )


def make_scheduler(config: pytest.Config, log: object) -> object:
    """What hands out groups whole, in the order of their first tests.

    `--dist loadgroup` would do, had pytest 9.2 not renamed what pytest-xdist 3.8 sets.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


@functools.cache
def _statements(path: str) -> list[ast.stmt]:
    """Those of a file that says something about groups: to parse all takes a second."""
    text = (ROOT / path).read_text("utf-8")
    return ast.parse(text).body if CLUSTERS in text or NAMED in text else []


@functools.cache
def _named_group(path: str) -> str:
    for node in _statements(path):
        if isinstance(node, ast.Assign) and NAMED in ast.unparse(node):
            return ast.literal_eval(node.value)
    return ""


@functools.cache
def _users_of_clusters(path: str) -> set[str]:
    """The tests of a file that take the fixture `clusters`."""
    return {
        node.name
        for node in _statements(path)
        if isinstance(node, ast.FunctionDef)
        and any(arg.arg == CLUSTERS for arg in node.args.args)
    }
