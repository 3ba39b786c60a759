"""The course of a job whose nodes come and go, without a network or waiting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.rendezvous.test_coordinator import HeartbeatConnection
from tfdp.launch.rendezvous.coordinator import Phase
from tfdp.launch.rendezvous.elastic_coordinator import ElasticCoordinator
from tfdp.launch.rendezvous.failure import NODE_LOST, Failure, RendezvousError
from tfdp.launch.rendezvous.restarts import RestartDecision
from tfdp.launch.rendezvous.roster import Hello

HELLO = Hello("1.0", "3.11", 3, 2, "train.py", False, "host", 0, min_nodes=1)


class Workers:
    """What the probe of node 0 sees."""

    seen_at: float | None = None
    members: frozenset[str] = frozenset()

    def watch(self, places, attempt_id):
        self.places, self.attempt_id = places, attempt_id

    def forget(self):
        self.seen_at = None


class Course:
    """A job of one to three nodes with two workers each, and its clock."""

    def __init__(self, least: int = 1) -> None:
        self.now = 1000.0
        self.hello = dataclasses.replace(HELLO, min_nodes=least)
        self.workers = Workers()
        self.coordinator = ElasticCoordinator(
            self.hello, 60.0, lambda _: self, self.workers, lambda: self.now
        )
        self.links: list[HeartbeatConnection] = []

    def decide(self, failure, seconds):
        self.failure = failure
        return RestartDecision(2.0, "restart")

    def join(self, **said: Any) -> HeartbeatConnection:
        link = HeartbeatConnection(f"10.0.0.{len(self.links) + 1}")
        rank = None if self.links else 0
        hello = dataclasses.replace(self.hello, node_rank=rank, **said)
        self.coordinator.join(link, hello)
        self.links.append(link)
        return link

    def rejoin(self, rank: int, **said: Any) -> HeartbeatConnection:
        """A node whose workers train has lost the former node 0."""
        running = {"node_rank": rank, "attempt": 3, "attempt_id": "id"}
        link = HeartbeatConnection(f"10.0.0.{rank + 1}")
        hello = dataclasses.replace(self.hello, ports=[1000, 2000], **running | said)
        self.coordinator.join(link, hello)
        self.links.append(link)
        return link

    def say(self, link: HeartbeatConnection, kind: str, **said: Any) -> None:
        attempt = link.last("prepare")["attempt"] if "prepare" in link.kinds() else 0
        message = {"type": kind, "attempt": attempt, **said}
        self.coordinator.receive(link, message)

    def pass_time(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.coordinator.tick()

    def answer(
        self, *links: HeartbeatConnection, ports: tuple[int, ...] = (100, 200)
    ) -> None:
        for link in links:
            self.say(link, "ports", ports=list(ports))
        self.pass_time()

    def start(
        self, nodes: int = 2, *, trains: bool = True
    ) -> list[HeartbeatConnection]:
        for _ in range(nodes):
            self.join()
        self.pass_time(6.0)
        self.answer(*self.links)
        assert self.coordinator.phase is Phase.RUNNING
        self.workers.seen_at = self.now if trains else None
        return self.links


def test_a_job_starts_with_the_least_nodes_after_a_moment_and_with_the_most_at_once():
    course = Course(least=2)
    course.join()
    course.pass_time(30.0)
    assert course.coordinator.phase is Phase.GATHERING
    course.join()
    course.pass_time(4.0)
    assert course.coordinator.phase is Phase.GATHERING
    course.pass_time(2.0)
    assert course.coordinator.phase is Phase.PREPARING
    # One that comes now is in the first cluster, too.
    course.join()
    course.pass_time()
    course.answer(*course.links)
    places = course.links[2].last("start")["nodes"]
    assert [host for host, _ in places] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    at_once = Course(least=2)
    for _ in range(3):
        at_once.join()
    at_once.pass_time()
    assert at_once.coordinator.phase is Phase.PREPARING


def test_a_node_that_is_lost_while_the_others_train_leaves_them_alone():
    course = Course()
    first, second = course.start()
    course.pass_time()
    assert first.kinds().count("trains") == second.kinds().count("trains") == 1
    course.coordinator.register_disconnect(second, "has closed its connection")
    course.pass_time()
    assert course.coordinator.phase is Phase.RUNNING
    assert "training continues with 1 node" in first.last("notice")["text"]
    course.say(first, "done", code=0)
    course.pass_time()
    assert first.last("end")["code"] == 0


def test_a_node_that_is_lost_before_training_has_begun_stops_all_which_start_again():
    course = Course()
    first, second = course.start(trains=False)
    course.coordinator.register_disconnect(second, "has closed its connection")
    assert first.last("stop")["code"] == NODE_LOST
    course.say(first, "stopped", code=NODE_LOST)
    course.pass_time()
    course.pass_time(3.0)
    course.pass_time(6.0)
    course.answer(first)
    assert first.last("start")["nodes"] == [("10.0.0.1", [100, 200])]


def test_a_node_that_comes_later_starts_its_workers_in_the_place_of_a_lost_one():
    course = Course()
    first, second = course.start()
    attempt_id = first.last("start")["id"]
    third = course.join()
    course.pass_time()
    assert third.last("prepare")["first_rank"] == 4
    course.answer(third)
    assert third.last("start")["is_late"]
    assert third.last("start")["id"] == attempt_id
    places = third.last("start")["nodes"]
    assert [host for host, _ in places] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert first.last("places")["nodes"] == course.workers.places == places
    course.coordinator.register_disconnect(second, "has closed its connection")
    fourth = course.join()
    course.pass_time()
    assert fourth.last("prepare")["node_rank"] == 1
    course.answer(fourth)
    hosts = [host for host, _ in fourth.last("start")["nodes"]]
    assert hosts == ["10.0.0.1", "10.0.0.4", "10.0.0.3"]


def test_a_node_that_comes_before_training_has_begun_waits_for_it():
    course = Course()
    course.start(trains=False)
    third = course.join()
    course.pass_time()
    assert "prepare" not in third.kinds()
    course.workers.seen_at = course.now
    course.pass_time()
    assert "prepare" in third.kinds()


def test_a_port_that_another_node_of_this_machine_has_is_not_taken_again():
    course = Course()
    course.start()
    third = course.join()
    third.peer = "10.0.0.1"
    course.pass_time()
    course.answer(third)
    assert "start" not in third.kinds()
    assert third.kinds().count("prepare") == 2
    course.answer(third, ports=(101, 201))
    assert "start" in third.kinds()


def test_a_node_that_gets_a_signal_leaves_the_others_alone():
    course = Course()
    first, second = course.start()
    course.say(second, "leaving", why="SIGTERM received", code=143, signal=15)
    assert "its workers stop, the others continue" in first.last("notice")["text"]
    course.say(second, "stopped", code=75, has_saved=True)
    assert second.last("end")["code"] == 75
    course.pass_time()
    assert course.coordinator.phase is Phase.RUNNING


def test_the_code_is_that_of_the_last_node_where_no_worker_has_ended_well():
    course = Course()
    first, second = course.start()
    course.say(first, "stopped", code=3)
    course.pass_time()
    assert "end" not in first.kinds()  # the others need its rendezvous
    course.say(second, "stopped", code=5)
    course.pass_time()
    assert [link.last("end")["code"] for link in course.links] == [5, 5]


def test_a_failure_that_leaves_no_worker_training_stops_all_nodes():
    course = Course()
    first, second = course.start()
    failure = Failure(2, 1, "failed with exit code 1")
    # The others train without it.
    course.workers.members = frozenset({"10.0.0.1:100"})
    course.coordinator.receive(second, failure.to_message(1))
    assert "stop" not in first.kinds()
    course.workers.members |= {"10.0.0.2:100"}
    course.coordinator.receive(second, failure.to_message(1))
    assert "worker 2 on node 1" in first.last("stop")["text"]


def test_workers_that_are_silent_for_a_minute_are_stopped():
    course = Course()
    first, _ = course.start()
    course.pass_time(59.0)
    assert "stop" not in first.kinds()
    course.pass_time(2.0)
    assert "no worker has answered for 61 s" in first.last("stop")["text"]


def test_more_nodes_than_the_most_and_other_numbers_of_workers_are_refused():
    course = Course()
    course.start(nodes=3)
    with pytest.raises(RendezvousError, match="has all of its 3 nodes already"):
        course.join()
    course.links[1].silent_seconds = 5.0  # as one that is off
    course.join()
    course.coordinator.register_disconnect(course.links[2], "has ended")
    with pytest.raises(RendezvousError, match="with -n 2, host with -n 3"):
        course.join(num_workers=3)
    with pytest.raises(RendezvousError, match="with --nodes 1:3, host with --nodes 3"):
        course.join(min_nodes=None)


def test_a_node_0_that_comes_back_takes_up_the_job_of_the_others():
    course = Course()
    first = course.join()
    newcomer = course.join()
    course.rejoin(2)
    assert course.workers.places[2] == ("10.0.0.3", [1000, 2000])
    course.workers.seen_at = course.now
    course.pass_time(1.0)
    assert "prepare" not in first.kinds()  # others may still come back
    course.coordinator.register_disconnect(newcomer, "has left")
    other = course.rejoin(1)
    course.pass_time(6.0)
    assert first.last("prepare")["attempt"] == 3
    course.answer(first)
    start = first.last("start")
    assert (start["id"], start["is_late"]) == ("id", True)
    assert [host for host, _ in start["nodes"]] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert other.last("places")["nodes"] == start["nodes"]


@pytest.mark.parametrize("seconds", [20.0, 100.0])
def test_all_nodes_come_back_after_a_suspension_of_node_0(seconds):
    course = Course()
    attempt_id = course.start()[0].last("start")["id"]
    for link in course.links[:]:
        course.coordinator.register_disconnect(link, "has not answered for 15 s")
    course.pass_time(seconds)
    course.workers.seen_at = course.now
    first, second = (
        course.rejoin(rank, attempt=1, attempt_id=attempt_id) for rank in range(2)
    )
    course.pass_time()
    assert course.coordinator.phase is Phase.RUNNING
    for link in (first, second):
        course.say(link, "done", attempt=1, code=0)
    course.pass_time()
    assert [link.last("end")["code"] for link in (first, second)] == [0, 0]


def test_nodes_that_have_come_back_do_not_wait_for_workers_that_are_lost_by_now():
    course = Course()
    course.join()
    second = course.rejoin(1)
    course.pass_time(61.0)
    assert "no worker has answered for 61 s" in second.last("stop")["text"]


def test_nodes_that_have_come_back_get_new_ranks_at_a_restart():
    course = Course()
    first = course.join()
    course.rejoin(2)
    course.workers.seen_at = course.now
    course.pass_time(61.0)  # the workers are silent
    course.say(course.links[1], "stopped", attempt=3, code=1)
    course.pass_time()
    course.pass_time(3.0)
    course.pass_time(6.0)
    assert course.links[1].last("prepare")["first_rank"] == 2
    course.answer(*course.links)
    assert len(first.last("start")["nodes"]) == 2


def test_a_node_0_that_has_begun_anew_refuses_those_of_the_former_job():
    course = Course()
    course.start(nodes=1)
    with pytest.raises(RendezvousError, match="has started again without this node"):
        course.rejoin(1)
