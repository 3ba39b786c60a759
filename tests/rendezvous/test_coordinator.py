"""The course of a job on several nodes, without a network and without waiting."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfdp.communication.connection.messages import encode
from tfdp.launch.rendezvous.coordinator import Coordinator, Phase
from tfdp.launch.rendezvous.failure import (
    NODE_LOST,
    Failure,
    MalformedMessage,
    RendezvousError,
)
from tfdp.launch.rendezvous.link import MAX_BYTES
from tfdp.launch.rendezvous.restarts import RestartDecision
from tfdp.launch.rendezvous.roster import Hello

JOIN_SECONDS = 60.0
HELLO = Hello("1.0", "3.11", 2, 2, "train.py", False, "host", node_rank=0)


class HeartbeatConnection:
    """A node at the other end, which keeps what it is told."""

    def __init__(self, peer: str = "10.0.0.2", local: str = "10.0.0.1"):
        self.peer, self.local = peer, local
        self.silent_seconds = 0.0
        self.told: list[dict[str, Any]] = []

    def send(self, message):
        self.told.append(dict(message))

    def last(self, kind: str) -> dict[str, Any]:
        return [message for message in self.told if message["type"] == kind][-1]

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.told]


class Course:
    """A job of two nodes with two workers each, and its clock."""

    def __init__(self, restarts: int = 0):
        self.now = 1000.0
        self.restarts = restarts
        self.asked: list[tuple[Failure, float, int]] = []
        self.coordinator = Coordinator(
            HELLO, JOIN_SECONDS, self.make_restarts, clock=lambda: self.now
        )
        self.num_workers = 0
        self.links = [
            HeartbeatConnection("127.0.0.1", "127.0.0.1"),
            HeartbeatConnection(),
        ]
        self.attempt = 0

    def make_restarts(self, num_workers):
        self.num_workers = num_workers
        return self

    def decide(self, failure, seconds):
        self.asked.append((failure, seconds, self.num_workers))
        if len(self.asked) > self.restarts:
            return None
        return RestartDecision(2.0, f"restart {len(self.asked)}")

    def join(self, node: int, **said: Any) -> None:
        said = {"node_rank": 0 if node == 0 else None, **said}
        self.coordinator.join(self.links[node], dataclasses.replace(HELLO, **said))

    def say(self, node: int, kind: str, **said: Any) -> None:
        message = {"type": kind, "attempt": self.attempt, **said}
        self.coordinator.receive(self.links[node], message)

    def fail(self, node: int, rank: int, code: int = 1, lost: int | None = None):
        failure = Failure(rank, code, f"failed with exit code {code}", "log", lost)
        self.coordinator.receive(self.links[node], failure.to_message(self.attempt))

    def pass_time(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.coordinator.tick()

    def prepare(self) -> None:
        self.pass_time()
        self.attempt = self.links[0].last("prepare")["attempt"]
        for node in range(2):
            self.say(node, "ports", ports=[100 + node, 200 + node])
        self.pass_time()

    def start(self) -> None:
        for node in range(2):
            self.join(node)
        self.prepare()
        assert self.coordinator.phase is Phase.RUNNING

    def stop(self) -> None:
        for node in range(2):
            self.say(node, "stopped", code=1, has_saved=False)
        self.pass_time()

    def ends(self) -> list[int]:
        return [link.last("end")["code"] for link in self.links]


def test_all_start_with_the_addresses_of_all_in_the_order_of_nodes():
    course = Course()
    course.start()
    # Node 0 has come by the loopback, which node 1 cannot use.
    for link in course.links:
        assert link.last("start")["nodes"] == [
            ("10.0.0.1", [100, 200]),
            ("10.0.0.2", [101, 201]),
        ]
    assert course.links[1].last("prepare") == {
        "type": "prepare",
        "attempt": 1,
        "node_rank": 1,
        "first_rank": 2,
        "num_workers": 4,
    }


def test_the_job_is_done_once_all_nodes_are():
    course = Course()
    course.start()
    course.say(0, "done", code=0)
    course.pass_time()
    assert course.coordinator.phase is Phase.RUNNING
    course.say(1, "done", code=0)
    course.pass_time()
    assert course.ends() == [0, 0]
    assert course.coordinator.is_over


def test_nodes_of_one_machine_stay_on_its_loopback():
    course = Course()
    course.links[1] = HeartbeatConnection("127.0.0.1", "127.0.0.1")
    course.start()
    hosts = [host for host, _ in course.links[0].last("start")["nodes"]]
    assert hosts == ["127.0.0.1", "127.0.0.1"]


def test_two_nodes_that_have_found_the_same_port_are_asked_again():
    course = Course()
    course.links[1] = HeartbeatConnection("127.0.0.1", "127.0.0.1")
    for node in range(2):
        course.join(node)
    course.pass_time()
    course.attempt = 1
    for node in range(2):
        course.say(node, "ports", ports=[100, 200 + node])
    course.pass_time()
    assert [link.kinds() for link in course.links] == [["prepare", "prepare"]] * 2
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING


IPV6 = "fd00:1111:2222:3333:4444:5555:6666:7777"


@pytest.mark.parametrize(
    ("nodes", "workers"),
    [(1024, 8), pytest.param(8192, 1, marks=pytest.mark.full)],
)
def test_a_message_holds_what_the_largest_job_says(nodes, workers):
    course = Course()
    hello = dataclasses.replace(HELLO, nodes=nodes, num_workers=workers, node_rank=None)
    coordinator = Coordinator(hello, 60.0, course.make_restarts, clock=lambda: 0.0)
    links = [HeartbeatConnection(IPV6, IPV6) for _ in range(nodes)]
    for link in links:
        coordinator.join(link, hello)
    coordinator.tick()
    ports = range(65535, 65535 - nodes * workers, -1)
    for rank, link in enumerate(links):
        own = list(ports[rank * workers : (rank + 1) * workers])
        message = {"type": "ports", "attempt": 1, "ports": own}
        coordinator.receive(link, message)
    coordinator.tick()
    assert len(links[0].last("start")["nodes"]) == nodes
    assert len(encode(links[0].last("start"))) <= MAX_BYTES
    assert coordinator.phase is Phase.RUNNING


def test_of_many_nodes_that_came_the_first_are_named():
    course = Course()
    hello = dataclasses.replace(HELLO, nodes=20, num_workers=1, node_rank=None)
    coordinator = Coordinator(
        hello, 60.0, course.make_restarts, clock=lambda: course.now
    )
    links = [HeartbeatConnection() for _ in range(19)]
    for link in links:
        coordinator.join(link, hello)
    course.now += 60.0
    coordinator.tick()
    text = links[0].last("end")["text"]
    assert text.count("(host, 10.0.0.2)") == 8
    assert "but 19 joined: a node (host, 10.0.0.2)" in text
    assert "(host, 10.0.0.2), 11 more. Start the same" in text


def test_ranks_that_are_wished_are_given_and_the_others_as_nodes_come():
    course = Course()
    hello = dataclasses.replace(HELLO, nodes=4)
    coordinator = Coordinator(hello, 60.0, course.make_restarts, clock=lambda: 0.0)
    links = [HeartbeatConnection() for _ in range(4)]
    for link, rank in zip(links, (None, 1, 0, None), strict=True):
        coordinator.join(link, dataclasses.replace(hello, node_rank=rank))
    coordinator.tick()
    ranks = [link.last("prepare")["node_rank"] for link in links]
    assert ranks == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"node_rank": 0}, "Two nodes have the same rank.* --node-rank 0 from other"),
        ({"node_rank": 2}, "--node-rank must be from 0 to 1.* Received: --node-rank 2"),
        ({"version": "2.0"}, "Node 0 has tfdp 1.0, other has tfdp 2.0. Install"),
        ({"python": "3.12"}, "Node 0 has Python 3.11, other has Python 3.12"),
        ({"nodes": 3}, "started with --nodes 2, other with --nodes 3"),
        ({"program": "other.py"}, "Node 0 runs train.py, other runs other.py"),
        ({"rebalance": True}, "Only other has --rebalance"),
        ({"num_workers": 9000}, "at most 8,192 workers in all. Received: -n 9000"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_the_job_waits_on(said, words):
    course = Course()
    course.join(0)
    with pytest.raises(RendezvousError, match=words):
        course.join(1, host="other", **said)
    course.join(1)
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING


def test_one_node_too_many_is_told_so():
    course = Course()
    course.start()
    with pytest.raises(RendezvousError, match="has all of its 2 nodes already: node 0"):
        course.coordinator.join(
            HeartbeatConnection(), dataclasses.replace(HELLO, node_rank=None)
        )


def test_nodes_that_do_not_come_are_counted():
    course = Course()
    course.join(0)
    course.pass_time(JOIN_SECONDS - 1)
    assert course.links[0].last("notice")["text"] == (
        "waiting for 1 more node; 1 of 2 nodes has joined"
    )
    course.pass_time(1)
    end = course.links[0].last("end")
    assert end["code"] == NODE_LOST
    assert end["text"].startswith("waited 60 s for 2 nodes, but 1 joined: node 0 (host")


def test_a_node_that_leaves_before_the_start_makes_room_for_another():
    course = Course()
    course.join(0)
    course.join(1)
    course.say(1, "leaving", why="SIGINT received", code=130, signal=2)
    assert course.links[1].last("end")["code"] == 130
    course.links[1] = HeartbeatConnection()
    course.join(1, num_workers=2)
    course.pass_time()
    # And one that goes while ports are asked for.
    course.coordinator.register_disconnect(course.links[1], "has closed its connection")
    course.pass_time()
    assert course.coordinator.phase is Phase.GATHERING
    course.links[1] = HeartbeatConnection()
    course.join(1, num_workers=2)
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING


def test_a_worker_that_fails_stops_all_with_one_sentence():
    course = Course()
    course.start()
    course.fail(1, rank=3, code=7)
    texts = {link.last("stop")["text"] for link in course.links}
    assert texts == {
        "worker 3 on node 1 (host, 10.0.0.2) failed with exit code 7; the workers of "
        "all nodes were stopped. Full output of worker 3, there: log"
    }
    course.pass_time(5)
    assert "end" not in course.links[0].kinds()  # workers still run
    course.stop()
    assert course.ends() == [7, 7]
    assert course.asked[0][1:] == (5.0, 4)


def test_who_says_that_another_was_lost_is_not_the_one_to_name():
    course = Course()
    course.start()
    course.fail(0, rank=0, lost=3)
    course.pass_time(5.0)
    assert "stop" not in course.links[0].kinds()
    course.fail(1, rank=3, code=137)
    assert "worker 3 on node 1" in course.links[0].last("stop")["text"]
    assert course.links[0].last("stop")["code"] == 137


def test_a_worker_that_only_others_have_seen_to_be_lost_is_named():
    course = Course()
    course.start()
    course.links[1].silent_seconds = 9.0
    course.fail(0, rank=0, lost=3)
    course.pass_time(1.0)
    text = course.links[0].last("stop")["text"]
    assert text.startswith(
        "worker 0 on node 0 (host, 127.0.0.1) failed with exit code 1 since worker 3 "
        "on node 1 (host, 10.0.0.2) was lost, which has not answered for 9 s; "
    )


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_node_that_does_not_stop_its_workers_is_not_waited_for_for_ever(restarts):
    course = Course(restarts)
    course.join(0)
    course.join(1, grace_seconds=20.0)
    course.prepare()
    course.fail(0, rank=1, code=7)
    course.say(0, "stopped", code=7, has_saved=False)
    course.pass_time(69.9)
    assert course.coordinator.phase is Phase.STOPPING
    course.pass_time(0.1)
    told = course.links[0].last("notice")["text"]
    words = "node 1 (host, 10.0.0.2) has not stopped its workers within 70 s"
    assert told == f"{words}; the job continues without it"
    assert course.links[1].last("end")["code"] == 7
    assert course.links[1].last("end")["text"] == words
    if not restarts:
        assert course.links[0].last("end")["code"] == 7
        return
    # What it says when it is there again has no effect; another may take its place.
    course.say(1, "stopped", code=7)
    course.pass_time(2.1)
    assert course.coordinator.phase is Phase.GATHERING
    course.links[1] = HeartbeatConnection()
    course.join(1)
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING


def test_two_who_blame_each_other_do_not_go_round_in_circles():
    course = Course()
    course.start()
    course.fail(0, rank=0, lost=3)
    course.fail(1, rank=3, lost=0)
    assert course.coordinator.phase is Phase.STOPPING


def test_a_node_that_is_lost_is_named_and_ends_all():
    course = Course()
    course.start()
    course.coordinator.register_disconnect(course.links[1], "has not answered for 15 s")
    assert course.links[0].last("stop")["text"] == (
        "node 1 (host, 10.0.0.2) was lost: it has not answered for 15 s; the workers "
        "of all nodes were stopped"
    )
    course.say(0, "stopped", code=69)
    course.pass_time()
    assert course.links[0].last("end")["code"] == NODE_LOST


def test_a_node_that_goes_once_its_workers_are_done_is_not_missed():
    course = Course()
    course.start()
    course.say(1, "done", code=0)
    course.coordinator.register_disconnect(course.links[1], "has closed its connection")
    course.say(0, "done", code=0)
    course.pass_time()
    assert course.links[0].last("end")["code"] == 0


def test_all_start_again_together_and_with_new_ports():
    course = Course(restarts=1)
    course.start()
    course.fail(0, rank=1)
    course.stop()
    assert course.links[1].last("restart")["text"] == "restart 1"
    course.pass_time(1.9)
    assert course.links[1].kinds().count("prepare") == 1
    course.pass_time(0.2)
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING
    assert course.links[1].last("start")["attempt"] == 2
    # What is said of the first attempt has no effect on the second.
    course.coordinator.receive(
        course.links[1], Failure(2, 1, "failed", "").to_message(1)
    )
    assert course.coordinator.phase is Phase.RUNNING
    course.fail(0, rank=1, code=5)
    course.stop()
    assert course.ends() == [5, 5]


def test_a_node_that_comes_back_joins_at_the_next_start():
    course = Course(restarts=1)
    course.start()
    course.coordinator.register_disconnect(course.links[1], "has closed its connection")
    course.say(0, "stopped", code=69)
    course.pass_time()
    course.pass_time(3)
    course.pass_time()
    assert (
        course.links[0]
        .last("notice")["text"]
        .startswith("waiting for node 1 (host, 10.0.0.2) to come back")
    )
    course.links[1] = HeartbeatConnection()
    with pytest.raises(RendezvousError, match="had 2 workers and comes back with 3"):
        course.join(1, num_workers=3)
    course.join(1)
    course.prepare()
    assert course.links[1].last("prepare")["first_rank"] == 2
    assert course.coordinator.phase is Phase.RUNNING


def test_a_node_that_does_not_come_back_ends_the_job():
    course = Course(restarts=1)
    course.start()
    course.coordinator.register_disconnect(course.links[1], "has closed its connection")
    course.say(0, "stopped", code=69)
    course.pass_time()
    course.pass_time(3)
    course.pass_time(JOIN_SECONDS)
    end = course.links[0].last("end")
    assert end["code"] == NODE_LOST
    assert "and 1 have come back" not in end["text"]
    assert "waited 60 s for 2 nodes, but 1 is connected" in end["text"]


def test_a_node_that_comes_back_before_its_silence_was_noticed_takes_its_place():
    course = Course(restarts=1)
    course.start()
    hello = {"node_rank": 1}
    again = HeartbeatConnection()
    with pytest.raises(RendezvousError, match="Two nodes have the same rank"):
        course.coordinator.join(again, dataclasses.replace(HELLO, **hello))
    course.links[1].silent_seconds = 5.0
    course.coordinator.join(again, dataclasses.replace(HELLO, **hello))
    assert course.coordinator.phase is Phase.STOPPING
    course.links[1] = again
    course.say(0, "stopped", code=69)
    course.pass_time()
    course.pass_time(3)
    course.prepare()
    assert course.coordinator.phase is Phase.RUNNING


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_on_one_node_ends_all_with_its_code(node):
    course = Course(restarts=3)
    course.start()
    course.say(node, "leaving", why="SIGINT received", code=130, signal=2)
    stop = course.links[1 - node].last("stop")
    assert (stop["signal"], stop["code"], stop["by"]) == (2, 130, node)
    assert stop["text"].startswith(f"SIGINT received on node {node} (host, ")
    course.stop()
    assert course.ends() == [130, 130]
    assert course.asked == []


def test_training_that_was_saved_because_of_a_signal_ends_with_its_own_code():
    course = Course(restarts=3)
    course.start()
    course.say(1, "leaving", why="SIGTERM received", code=143, signal=15)
    course.say(0, "stopped", code=143, has_saved=False)
    course.say(1, "stopped", code=75, has_saved=True)
    course.pass_time()
    assert course.ends() == [75, 75]


def test_a_signal_between_two_attempts_is_the_end():
    course = Course(restarts=3)
    course.start()
    course.fail(0, rank=1)
    course.say(1, "leaving", why="SIGINT received", code=130, signal=2)
    course.stop()
    assert course.ends() == [130, 130]
    course = Course(restarts=3)
    course.start()
    course.fail(0, rank=1)
    course.stop()
    course.say(1, "leaving", why="SIGINT received", code=130, signal=2)
    assert course.ends() == [130, 130]


FAILED = {"rank": 2, "code": 1, "reason": "failed", "log": ""}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ports", {"ports": "many"}),
        ("ports", {"ports": [1]}),
        ("ports", {"ports": [0, 1]}),
        ("ports", {"ports": [1, "2"]}),
        ("failed", {"rank": "one"}),
        ("failed", {}),
        ("failed", {**FAILED, "rank": 4}),  # no worker of the job
        ("failed", {**FAILED, "rank": -1}),
        ("failed", {**FAILED, "rank": 1}),  # one of the other node's
        ("failed", {**FAILED, "lost_rank": []}),
        ("failed", {**FAILED, "lost_rank": ""}),
        ("leaving", {"why": 3, "code": 1, "signal": 1}),
        ("leaving", {"why": "x", "code": None, "signal": 1}),
    ],
)
def test_a_message_that_no_node_sends_is_malformed(kind, said):
    course = Course()
    course.start()
    with pytest.raises(MalformedMessage):
        course.say(1, kind, **said)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "ports"},
        {**HELLO.to_message(), "nodes": 0},
        {**HELLO.to_message(), "nodes": True},
        {**HELLO.to_message(), "num_workers": 10**9},
        {**HELLO.to_message(), "node_rank": "0"},
        {**HELLO.to_message(), "host": None},
        {**HELLO.to_message(), "rebalance": 1},
        {**HELLO.to_message(), "grace_seconds": -1},
        {**HELLO.to_message(), "grace_seconds": "5"},
        {**HELLO.to_message(), "grace_seconds": float("nan")},
    ],
)
def test_a_hello_of_another_form_is_malformed(message):
    with pytest.raises(MalformedMessage):
        Hello.from_message(message)
    assert Hello.from_message(HELLO.to_message()) == HELLO
