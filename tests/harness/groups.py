"""Which tests share a process of pytest-xdist, and in which order all are run."""

from __future__ import annotations

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLUSTERS = "clusters"


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
    """Sorts: first the longest groups, and in each last what must run alone."""
    groups = {item.nodeid: group_of(item.nodeid) for item in items}
    slow = {
        groups[item.nodeid]
        for item in items
        if item.get_closest_marker("slow") or item.get_closest_marker("processes")
    }

    def key(item: pytest.Item) -> tuple[bool, bool, bool]:
        group = groups[item.nodeid]
        is_alone = not getattr(params_of(item).get("case"), "side_by_side", True)
        return group != CLUSTERS, group not in slow, is_alone

    items.sort(key=key)


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
    return ast.parse((ROOT / path).read_text("utf-8")).body


@functools.cache
def _named_group(path: str) -> str:
    for node in _statements(path):
        if isinstance(node, ast.Assign) and "PROCESS_GROUP" in ast.unparse(node):
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
