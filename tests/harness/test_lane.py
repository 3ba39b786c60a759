"""The queue of a set-up: its order, failures, and an end that leaves nobody waiting."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tests.harness import lane as module
from tests.harness.cluster import ClusterError
from tests.harness.lane import Lane
from tests.harness.registry import Case
from tests.harness.results import Outcome
from tests.harness.setups import MIRRORED


class FakeCluster:
    """Runs nothing; notes what it was sent, and waits where a case is a lock."""

    log: list[str]
    gate: threading.Event

    def __init__(self, setup, flavor):
        self.healthy = True
        self.log.append("start")

    def send(self, name, tmp):
        self.log.append(name)

    def collect(self, deadline_seconds):
        self.gate.wait(10.0)
        if self.log[-1] == "broken":
            self.healthy = False
            raise ClusterError("no answer")
        return [Outcome({})]

    def kill(self):
        self.gate.set()

    def close(self):
        self.log.append("close")


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch):
    FakeCluster.log, FakeCluster.gate = [], threading.Event()
    monkeypatch.setattr(module, "Cluster", FakeCluster)
    made = Lane(MIRRORED, "tfdp")
    yield made
    made.close()


def case(name: str, fresh: bool = False) -> Case:
    return Case(name, dict, "", "", (), fresh=fresh)


TMP = pathlib.Path()


def test_what_a_test_waits_for_goes_before_what_is_planned(lane: Lane):
    planned = [lane.submit(case(name), TMP, is_planned=True) for name in "abc"]
    urgent = lane.submit(case("urgent"), TMP)
    FakeCluster.gate.set()
    for outcomes in [*planned, urgent]:
        outcomes.result(10.0)
    names = [name for name in FakeCluster.log if name != "start"]
    # The first may have been taken before there was another.
    assert names in (["a", "urgent", "b", "c"], ["urgent", "a", "b", "c"])


def test_a_broken_cluster_is_replaced_and_a_fresh_case_has_its_own(lane: Lane):
    FakeCluster.gate.set()
    (outcome,) = lane.submit(case("broken"), TMP).result(10.0)
    assert outcome.error == "no answer"
    for one in (case("a"), case("b"), case("c", fresh=True)):
        lane.submit(one, TMP).result(10.0)
    sent = ["start", "broken", "close", "start", "a", "b", "close", "start", "c"]
    assert FakeCluster.log == sent


def test_a_cluster_is_replaced_after_some_cases(lane: Lane, monkeypatch):
    monkeypatch.setattr(module, "CASES_PER_CLUSTER", 2)
    FakeCluster.gate.set()
    for name in "abc":
        lane.submit(case(name), TMP).result(10.0)
    assert FakeCluster.log == ["start", "a", "b", "close", "start", "c"]


def test_after_closing_what_is_queued_is_not_run(lane: Lane):
    running = lane.submit(case("a"), TMP)
    lane.submit(case("b"), TMP, after=running)
    lane.close()
    assert "b" not in FakeCluster.log
