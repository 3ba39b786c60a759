"""Which tests share a process of pytest-xdist, and in which order all are run."""

from __future__ import annotations

import pytest

CLUSTERS = "clusters"


def params_of(item: pytest.Item) -> dict:
    """The parameters of a test."""
    return getattr(getattr(item, "callspec", None), "params", {})


def group_of(item: pytest.Item) -> str:
    """The name of its group: the tests that share clusters, or those of a file."""
    if "clusters" in getattr(item, "fixturenames", ()):
        return CLUSTERS
    return item.nodeid.partition("::")[0]


def order(items: list[pytest.Item]) -> None:
    """Sorts: first the longest groups, and in each last what must run alone."""
    slow = {group_of(item) for item in items if item.get_closest_marker("slow")}

    def key(item: pytest.Item) -> tuple[bool, bool, bool]:
        group = group_of(item)
        is_alone = not getattr(params_of(item).get("case"), "side_by_side", True)
        return group != CLUSTERS, group not in slow, is_alone

    items.sort(key=key)
