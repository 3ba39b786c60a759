"""Checkpoints of sharded state move between any number of replicas."""

from __future__ import annotations

from tests.checkpoint import cases_moving as moving
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case

CASE_MODULES = ("checkpoint.cases_moving",)


def test_move(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def test_every_target_and_both_kinds_of_file_are_covered():
    chosen = [pair for pairs in moving.COVERING.values() for pair in pairs]
    assert {target for target, _ in chosen} == set(moving.TARGETS)
    assert {kind for _, kind in chosen} == set(moving.KINDS)
