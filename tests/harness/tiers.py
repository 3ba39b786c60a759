"""The tiers of the tests: what is run before each commit, by CI, and at all.

A test without a mark is in the quick tier; `@pytest.mark.standard` and
`@pytest.mark.full` leave it to a higher one. Each tier holds those below it.
"""

from __future__ import annotations

import typing

import pytest

TIERS = ("quick", "standard", "full")


def standard(*values: typing.Any) -> typing.Any:
    """Values of `parametrize` from the standard tier on."""
    return pytest.param(*values, marks=pytest.mark.standard)


def full(*values: typing.Any) -> typing.Any:
    """Values of `parametrize` for the full tier only."""
    return pytest.param(*values, marks=pytest.mark.full)


def tier_of(item: pytest.Item) -> str:
    """The lowest tier that runs a test."""
    marked = (tier for tier in reversed(TIERS) if item.get_closest_marker(tier))
    return next(marked, TIERS[0])


def add_options(group: pytest.OptionGroup) -> None:
    """Adds `--tier` and `--beyond` to pytest's options."""
    group.addoption(
        "--tier",
        choices=TIERS,
        default="standard",
        help="run the tests of this tier and of those below it (default: standard)",
    )
    group.addoption(
        "--beyond",
        choices=TIERS[:-1],
        help="leave out the tests of this tier and of those below it",
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of other tiers."""
    last = TIERS.index(config.getoption("tier"))
    beyond = config.getoption("beyond")
    first = TIERS.index(beyond) + 1 if beyond else 0
    chosen = TIERS[first : last + 1]
    others = [item for item in items if tier_of(item) not in chosen]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if tier_of(item) in chosen]
