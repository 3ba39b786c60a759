"""What a step gathers: told, compared and refused, case by case and by its bytes."""

from __future__ import annotations

import pytest

from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.ground.plans.gathers import Gather, StepGathers

CASE_MODULES = ("program.cases_gathers",)


def test_gathers_case(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def gather(bytes_each: int, power: int, *, is_sum: bool = False) -> Gather:
    return Gather("Sort", "train.py:3", is_sum, bytes_each, power, True)


@pytest.mark.parametrize(
    ("found", "rows", "is_large"),
    [
        (gather(4, 1), 4096, False),  # labels
        (gather(40, 1), 4096, False),  # logits of ten classes
        (gather(4096, 1), 256, True),
        (gather(4096, 1), None, True),
        (gather(4, 2), 32, False),  # similarities of few rows
        (gather(4, 2), 4096, True),
        (gather(3 * 4 * 512, 0, is_sum=True), 256, False),  # moments of a layer
        (gather(4 * 10**6, 0, is_sum=True), None, True),  # gradients clipped by hand
    ],
)
def test_what_is_small_for_each_row_is_not_told(found, rows, is_large):
    assert found.is_large(rows) == is_large


def test_bytes_grow_with_the_rows_of_a_batch():
    step = StepGathers(100, (gather(4, 2), gather(4096, 1), gather(8192, 0)))
    assert step.num_bytes == 4 * 100**2 + 4096 * 100 + 8192
    assert step.largest == (409600, step.gathers[1])
    unknown = StepGathers(None, step.gathers)
    assert unknown.num_bytes == 8192
    assert "4,096 bytes for each row for `Sort` (train.py:3)" in str(unknown)
