"""The tiers of the tests: what is run before each commit, and all.

A test without a mark is in the quick tier; `@pytest.mark.full` leaves it to the full
one, which holds both.
"""

from __future__ import annotations

import typing

import pytest

QUICK, FULL, REST = TIERS = ("quick", "full", "rest")


def full(*values: typing.Any) -> typing.Any:
    """Values of `parametrize` for the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def add_options(group: pytest.OptionGroup) -> None:
    """Adds `--tier` to pytest's options."""
    group.addoption(
        "--tier",
        choices=TIERS,
        default=QUICK,
        help="run this tier, or what the full one has beyond the quick one "
        "(default: quick)",
    )


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of other tiers."""
    tier = config.getoption("tier")
    if tier == FULL:
        return
    others = [
        item for item in items if bool(item.get_closest_marker(FULL)) != (tier == REST)
    ]
    if others:
        config.hook.pytest_deselected(items=others)
        left = set(others)
        items[:] = [item for item in items if item not in left]
