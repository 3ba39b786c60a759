"""A short form of `tools/fuzz`: mutated files load whole, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint import fuzzing
from tests.harness import forks
from tests.harness.tiers import full


def rows_of(kind: str, count: int, seed: int) -> list[dict[str, Any]]:
    """What came of mutations of a kind, in a process of its own."""
    import json

    lines: list[str] = []
    mutations = [m for m in fuzzing.campaign(4 * count, seed) if m.kind == kind]
    fuzzing.run(mutations, lines.append)
    return [row for row in map(json.loads, lines) if row["result"]]


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("kind", fuzzing.KINDS)
@pytest.mark.parametrize(("count", "seed"), [(40, 2), full(250, 3)])
def test_mutated_files_load_whole_or_are_refused_in_a_sentence(kind, count, seed):
    arguments = {"kind": kind, "count": count, "seed": seed}
    (answer,) = forks.run([forks.Start(rows_of, arguments=arguments)], 60 + count)
    assert not answer.error, answer
    rows = answer.value
    assert len(rows) == count
    found = {row["result"] for row in rows}
    assert found <= {fuzzing.EQUAL, fuzzing.REFUSED}, rows
    assert fuzzing.REFUSED in found


@pytest.mark.full
@pytest.mark.processes
def test_a_backup_with_junk_in_any_field_of_its_run_resumes_or_is_passed_over():
    start = forks.Start(fuzzing.resume_everywhere, arguments={"of_each": 4})
    (answer,) = forks.run([start], 280)
    assert not answer.error, answer
    found = answer.value
    good = (fuzzing.EQUAL, fuzzing.REFUSED)
    assert not {what: came for what, came in found.items() if came not in good}
    assert fuzzing.EQUAL in found.values()
