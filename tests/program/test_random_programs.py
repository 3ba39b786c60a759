"""A short form of `tools/fuzz program`: random programs equal one device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.harness import forks
from tests.harness.tiers import full
from tests.program import campaign
from tests.program.found_programs import FOUND

pytestmark = pytest.mark.processes
DEADLINE_SECONDS = 120


# Found programs of the quick tier: rows that are mapped, padded, paired and checked.
QUICK = (
    "a loop over rows",
    "pairs of rows, cut by the number of rows",
    "labels of no rows",
    "a check of a sum, after which another replica checks what the sum needs",
)


def outcomes_of_found(
    names: Sequence[str], counts: Sequence[int]
) -> dict[str, list[str]]:
    """What came of the programs that were found, in a process of its own."""
    campaign.prepare()
    from tests.program import fuzzing

    runs = fuzzing.Campaign()
    return {
        name: [
            f"{o.result} {o.details}"
            for o in (runs.run(FOUND[name], count) for count in counts)
        ]
        for name in names
    }


def rows_of(first: int, count: int) -> list[dict[str, Any]]:
    """What came of the programs of some seeds."""
    lines: list[str] = []
    campaign.run(range(first, first + count), lines.append)
    return [row for row in map(json.loads, lines) if "steps" in row]


def run(action: Any, seconds: float, **arguments: Any) -> Any:
    """Return what an action returns in a process of its own."""
    (answer,) = forks.run([forks.Start(action, arguments=arguments)], seconds)
    assert not answer.error, answer
    return answer.value


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        pytest.param(QUICK, (2,), id="quick"),
        pytest.param(tuple(FOUND), (2, 4), id="all", marks=pytest.mark.full),
    ],
)
def test_programs_that_were_found_equal_one_device(names, counts):
    found = run(outcomes_of_found, DEADLINE_SECONDS, names=names, counts=counts)
    failed = {
        name: results
        for name, results in found.items()
        if any(result.strip() != campaign.EQUAL for result in results)
    }
    assert set(found) == set(names)
    assert not failed, failed


@pytest.mark.parametrize(
    ("first", "count"), [full(5000, 2), full(5002, 14), full(6000, 200)]
)
def test_random_programs_equal_one_device(first, count):
    rows = run(rows_of, DEADLINE_SECONDS + 3 * count, first=first, count=count)
    assert len(rows) == count
    bad = [row for row in rows if row["result"] not in campaign.GOOD]
    assert not bad, bad
    equal = sum(row["result"] == campaign.EQUAL for row in rows)
    assert equal > 0.8 * count
