"""A short form of `tools/fuzz program`: random programs equal one device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness import forks
from tests.harness.tiers import full
from tests.program import campaign
from tests.program.found_programs import FOUND

pytestmark = pytest.mark.processes
DEADLINE_SECONDS = 120


def outcomes_of_found(counts: list[int]) -> dict[str, list[str]]:
    """What came of the programs that were found, in a process of its own."""
    campaign.prepare()
    from tests.program import fuzzing

    runs = fuzzing.Campaign()
    return {
        name: [f"{o.result} {o.details}" for o in (runs.run(p, n) for n in counts)]
        for name, p in FOUND.items()
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


@pytest.mark.parametrize("counts", [[2], full([2, 4])])
def test_programs_that_were_found_equal_one_device(counts):
    found = run(outcomes_of_found, DEADLINE_SECONDS, counts=counts)
    failed = {
        name: results
        for name, results in found.items()
        if any(result.strip() != campaign.EQUAL for result in results)
    }
    assert set(found) == set(FOUND)
    assert not failed, failed


@pytest.mark.parametrize(
    ("first", "count"), [(5000, 6), full(5006, 10), full(6000, 200)]
)
def test_random_programs_equal_one_device(first, count):
    rows = run(rows_of, DEADLINE_SECONDS + 3 * count, first=first, count=count)
    assert len(rows) == count
    bad = [row for row in rows if row["result"] not in campaign.GOOD]
    assert not bad, bad
    equal = sum(row["result"] == campaign.EQUAL for row in rows)
    assert equal > 0.8 * count
