"""What members of a job get from its store."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.timing import wait_until
from tests.store.clusters import cluster_of, members_of, on_all
from tfdp.communication.connection import messages as messages_module
from tfdp.communication.connection.handshake import ConnectionFailed
from tfdp.communication.connection.messages import encode
from tfdp.communication.store import HostLost, Membership, MessageTooLong, Store
from tfdp.communication.store import client as client_module
from tfdp.communication.store import replication as replication_module
from tfdp.communication.store import server as server_module
from tfdp.communication.store.contents import Contents
from tfdp.communication.store.replication import Replication


@pytest.fixture
def members() -> Iterator[list[Membership]]:
    with members_of(cluster_of(3)) as members:
        yield members


@pytest.fixture
def stores(members: list[Membership]) -> list[Store]:
    return [member.store for member in members]


def later(function, *args) -> Future:
    """The result of a call on a thread, which has begun to wait."""
    future: Future = Future()
    threading.Thread(
        target=lambda: future.set_result(function(*args)), daemon=True
    ).start()
    time.sleep(0.05)
    return future


def test_a_value_is_read_by_all_and_can_be_replaced_and_deleted(stores: list[Store]):
    stores[1].put("key", "first")
    assert [store.get("key", 5) for store in stores] == ["first"] * 3
    stores[2].put("key", "sécond")
    assert stores[0].get("key", 5) == "sécond"
    stores[0].delete("key")
    with pytest.raises(TimeoutError, match="key"):
        stores[1].get("key", 0.01)


def test_who_waits_for_a_value_gets_it_once_it_is_set(stores: list[Store]):
    waiting = [later(store.get, "key", 10) for store in stores]
    assert not any(future.done() for future in waiting)
    stores[1].put("key", "text")
    assert [future.result(5) for future in waiting] == ["text"] * 3


def test_a_wait_that_is_given_up_leaves_nothing_behind(members: list[Membership]):
    for _ in range(3):
        with pytest.raises(TimeoutError):
            members[1].store.get("key", 0.001)
    assert members[0].server._readers == {}
    assert members[1].store._waiting == {}


def test_values_that_arrive_while_waits_are_given_up_are_not_lost(
    stores: list[Store],
):
    found = 0
    for number in range(100):
        waiting = later_without_pause(stores[1].get, f"key{number}", 0.002)
        stores[0].put(f"key{number}", "text")
        found += waiting() == "text"
        assert stores[1].get(f"key{number}", 5) == "text"
    assert found > 0


def later_without_pause(function, *args):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args)

    def result():
        try:
            return future.result(10)
        except TimeoutError:
            return None
        finally:
            pool.shutdown()

    return result


def test_an_all_gather_gives_each_member_all_texts(members: list[Membership]):
    def gather(member: Membership) -> list[str] | None:
        text = f"from {member.cluster.rank}"
        return member.store.gather("call", text).texts(10)

    assert on_all(members, gather) == [["from 0", "from 1", "from 2"]] * 3
    assert members[0].server._gathers == {}


def test_an_all_gather_costs_the_host_two_messages_a_member_and_two_for_the_copy(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    served: list[str] = []
    sent: list[bytes] = []
    serve, send = server_module.Server._serve, server_module._Member.send_encoded

    def serving(server, member, message) -> None:
        served.append(message["do"])
        serve(server, member, message)

    def sending(member, encoded) -> None:
        sent.append(encoded)
        send(member, encoded)

    monkeypatch.setattr(server_module.Server, "_serve", serving)
    monkeypatch.setattr(server_module._Member, "send_encoded", sending)
    on_all(members, lambda member: member.store.gather("call", "text").texts(10))
    assert sorted(served) == ["acknowledge", "gather", "gather", "gather"]
    assert len(sent) == 4


def test_an_all_gather_says_who_is_missing_and_can_be_withdrawn(stores: list[Store]):
    gatherings = [store.gather("call", "") for store in stores[:2]]
    assert gatherings[1].texts(0.01) is None
    assert gatherings[1].missing() == [2]
    assert gatherings[1].withdraw()
    assert gatherings[0].missing() == [1, 2]
    again = [stores[1].gather("call", "a"), stores[2].gather("call", "b")]
    assert [one.texts(5) for one in (gatherings[0], *again)] == [["", "a", "b"]] * 3
    assert not again[0].withdraw()


def test_a_member_that_ends_right_after_an_all_gather_takes_no_answer_along():
    for _ in range(5):
        with members_of(cluster_of(3)) as members:
            big = "x" * 200_000
            gatherings = [member.store.gather("call", big) for member in members]
            assert gatherings[0].texts(10) == [big] * 3
            members[0].leave()
            assert [g.texts(10) for g in gatherings[1:]] == [[big] * 3] * 2


def test_the_next_worker_hosts_the_store_once_its_host_has_left(
    members: list[Membership],
):
    members[1].store.put("key", "text")
    waiting = members[1].store.gather("call", "")
    begin = time.monotonic()
    members[0].leave()
    assert [member.store.get("key", 5) for member in members[1:]] == ["text"] * 2
    assert [member.store.host for member in members[1:]] == [1, 1]
    assert waiting.missing() == [0, 2]
    assert beat(members[2])["lost"] == [0]
    assert time.monotonic() - begin < 3


def test_a_standby_that_is_suspended_is_replaced(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replication_module, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(Store, "_acknowledge", acknowledge_but_by(1))
    waiting = later(members[2].store.put, "key", "text")
    assert not waiting.done()

    def is_written() -> bool:
        beat(members[2])  # at each heartbeat the host looks whether the standby is slow
        return waiting.done()

    wait_until(is_written, "the next standby", 5)
    monkeypatch.undo()
    members[0].leave()
    assert members[1].store.get("key", 5) == "text"
    assert members[1].store.host == 2
    wait_until(lambda: members[2].store.host == 2, "the new host itself", 5)


def test_an_idle_member_follows_one_host_after_the_other(members: list[Membership]):
    members[2].store.put("key", "text")
    members[0].leave()
    wait_until(lambda: members[2].store.host == 1, "member 2 to follow", 5)
    members[1].leave()
    assert members[2].store.get("key", 5) == "text"
    assert members[2].store.host == 2


def test_answers_that_wait_for_the_copy_are_sent_before_the_host_leaves(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    acknowledge = Store._acknowledge

    def acknowledge_late(store: Store, number: int) -> None:
        time.sleep(0.3)
        acknowledge(store, number)

    monkeypatch.setattr(Store, "_acknowledge", acknowledge_late)
    gatherings = [member.store.gather("call", "text") for member in members]
    assert gatherings[0].texts(10) == ["text"] * 3
    members[0].leave()
    members[1].leave()
    assert gatherings[2].texts(10) == ["text"] * 3


def test_a_copy_that_takes_long_is_waited_for_while_it_grows(
    monkeypatch: pytest.MonkeyPatch,
):
    now = itertools.count(1.0, step=0.6 * replication_module._SLOW_SECONDS)
    clock = types.SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr(replication_module, "time", clock)
    contents = Contents()
    contents.apply({"values": {str(number): "text" for number in range(10)}})
    receivers = {rank: Receiver(rank) for rank in range(3)}
    replication = Replication(0, contents, receivers)
    replication.begin()
    for number in range(1, replication._sent + 1):
        replication.check()
        replication.acknowledge(1, number)
    assert replication.standby is receivers[1]
    assert encode({"standby": 1}) in receivers[2].sent


class Receiver:
    """A member that keeps what it is sent."""

    has_output = False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[bytes] = []

    def send_encoded(self, text: bytes) -> None:
        self.sent.append(text)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_host_whose_thread_fails_is_followed_and_its_own_calls_end(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    def fail(member, message) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(members[0].server, "_serve", fail)
    with pytest.raises(HostLost, match="thread of this worker's connections has"):
        members[0].store.put("key", "text")
    members[2].store.put("key", "text")
    assert members[1].store.get("key", 5) == "text"


def test_a_process_that_is_shutting_down_follows_no_host(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    waiting = members[2].store.gather("call", "")

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(client_module.threading.Thread, "start", start)
        members[0].leave()
        with pytest.raises(HostLost, match="on worker 0, has ended"):
            waiting.texts(10)


def test_texts_that_are_too_long_together_end_the_all_gather_for_all(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(messages_module, "MAX_BYTES", 1000)
    for error in on_all(members, failure_of_gather):
        assert "too long for the job's store: the limit" in str(error)
    members[1].leave()
    members[2].store.put("key", "text")
    members[0].leave()
    assert members[2].store.get("key", 5) == "text"


def failure_of_gather(member: Membership) -> BaseException | None:
    try:
        member.store.gather("call", "x" * 400).texts(10)
    except TimeoutError as error:
        return error
    return None


def acknowledge_but_by(rank: int):
    """`Store._acknowledge` that does nothing on one member."""
    acknowledge = Store._acknowledge
    return lambda store, number: store.rank == rank or acknowledge(store, number)


def test_waits_of_an_all_gather_end_early_once_they_are_woken(stores: list[Store]):
    waiting = later(stores[1].gather("call", "").texts, 30)
    assert not waiting.done()
    stores[1].wake()
    assert waiting.result(5) is None


def test_all_learn_at_once_that_a_member_has_ended(members: list[Membership]):
    news: queue.Queue[dict[str, Any]] = queue.Queue()
    for member in members[:2]:
        member.store.news = news.put
    members[2].leave()
    assert [news.get(timeout=5) for _ in range(2)] == [{"lost": [2]}] * 2
    assert beat(members[1])["lost"] == [2]


def beat(
    member: Membership, text: str = "report", *, wants_all: bool = False, **is_: bool
) -> dict[str, Any]:
    kind = {"is_notable": False, "is_news": False} | is_
    return member.store.beat(text, wants_all=wants_all, **kind)


def reports(answer: dict[str, Any]) -> dict[str, str]:
    return {rank: text for rank, (_, text) in answer["beats"].items()}


def test_heartbeats_are_answered_with_notable_reports_or_all(
    members: list[Membership],
):
    beat(members[0], "computes")
    time.sleep(0.05)
    assert reports(beat(members[1], "waits", is_notable=True)) == {"1": "waits"}
    time.sleep(0.05)  # a summary is sent again for some milliseconds
    assert reports(beat(members[2])) == {"1": "waits"}
    found = beat(members[2], wants_all=True)
    assert reports(found) == {"0": "computes", "1": "waits", "2": "report"}
    assert found["ages"] == {}
    assert found["lost"] == []
    assert all(0 <= age < 5 for age, _ in found["beats"].values())


def test_a_member_that_sends_no_heartbeat_is_listed_with_the_age_of_its_last(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server_module, "_BEAT_SECONDS", 0.2)
    beat(members[0])
    time.sleep(0.5)
    found = beat(members[1])["ages"]
    assert set(found) == {"0", "2"}
    assert all(0.3 < age < 5 for age in found.values())


def test_news_are_sent_to_all_members_at_once(members: list[Membership]):
    news: queue.Queue[dict[str, Any]] = queue.Queue()
    members[2].store.news = news.put
    beat(members[1], "failed", is_news=True)
    assert news.get(timeout=5) == {"beats": {"1": [0.0, "failed"]}}


def test_a_host_that_does_not_answer_is_itself_what_is_missing(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    gathering = members[1].store.gather("call", "")
    monkeypatch.setattr(members[0].server, "_serve", lambda member, request: None)
    monkeypatch.setattr(client_module, "_ANSWER_SECONDS", 0.05)
    assert gathering.missing() == [0]
    assert gathering.withdraw()


def test_large_texts_reach_a_member_that_reads_slowly(members: list[Membership]):
    text = "x" * (4 << 20)
    members[1].store.put("key", text)
    waiting = [later(members[2].store.get, "key", 20) for _ in range(3)]
    members[0].store.put("other", "small")
    assert members[0].store.get("other", 5) == "small"
    assert all(future.result(20) == text for future in waiting)


def test_a_text_that_is_too_long_is_refused_before_it_is_sent(
    members: list[Membership], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(messages_module, "MAX_BYTES", 1000)
    with pytest.raises(MessageTooLong, match=r"the limit is 0 MiB. Received: 0.0 MiB"):
        members[1].store.put("key", "x" * 1000)
    members[1].store.put("key", "text")
    assert members[2].store.get("key", 5) == "text"


def test_a_text_beyond_the_limit_gets_one_sentence_and_the_store_works_on(
    members: list[Membership],
):
    members[1].store.put("key", "before")
    with pytest.raises(MessageTooLong) as caught:
        members[1].store.put("key", "x" * (65 << 20))
    assert str(caught.value) == (
        "A text that workers exchange is too long for the job's store: the limit is "
        "64 MiB. Received: 65.0 MiB"
    )
    assert [member.store.get("key", 5) for member in members] == ["before"] * 3
    members[1].store.put("key", "after")
    assert [member.store.get("key", 5) for member in members] == ["after"] * 3


@pytest.mark.parametrize(
    "sent",
    [
        b'{"id":9,"oldest":9,"do":"explode"}',
        b'{"id":9}',
        b'{"id":9,"oldest":9}',
        b'{"id":9,"oldest":"no number","do":"put","key":"k","text":""}',
        b'{"id":9,"oldest":9,"do":"put","key":"k"}',
        b"[]",
        b"nope",
    ],
)
def test_a_member_that_sends_something_else_is_cut_off(
    members: list[Membership], sent: bytes
):
    is_cut_off(members, lambda connection: connection.send_encoded(sent))


@pytest.mark.parametrize("sent", [b"\xff" * 36, b"\0\0\0\2" + bytes(32) + b"{}"])
def test_a_message_that_somebody_else_has_sent_cuts_the_connection_off(
    members: list[Membership], sent: bytes
):
    is_cut_off(members, lambda connection: connection.sock.sendall(sent))


def is_cut_off(members: list[Membership], send) -> None:
    """Whether the others lose member 1 once it sends something, and nothing else."""
    lost = threading.Event()
    members[2].store.news = lambda news: lost.set()
    send(members[1].store.connection)
    assert lost.wait(5)
    members[2].store.put("key", "text")
    assert members[0].store.get("key", 5) == "text"


def test_an_all_gather_of_the_living_is_complete_without_lost_members(
    members: list[Membership],
):
    gatherings = [
        member.store.gather("left", str(member.cluster.rank), is_of_living=True)
        for member in members[:2]
    ]
    assert gatherings[0].texts(0.1) is None
    assert gatherings[0].missing() == [2]
    members[1].store.expel([2])
    for gathering in gatherings:
        assert gathering.texts(5.0) == ["0", "1", None]
    with pytest.raises(HostLost):
        members[2].store.gather("left", "2", is_of_living=True).texts(10.0)


def test_an_all_gather_of_the_living_ends_when_a_member_ends(members: list[Membership]):
    gatherings = [
        member.store.gather("left", "", is_of_living=True) for member in members[:2]
    ]
    members[2].leave()
    for gathering in gatherings:
        assert gathering.texts(5.0) == ["", "", None]


def test_a_store_that_is_lost_begins_anew_at_the_first_member_that_is_left(
    members: list[Membership],
):
    members[2].store.fail("for a test")
    members[1].store.fail("for a test")
    on_all(members[1:], lambda member: restarted(member, lost=[0]))
    texts = on_all(
        members[1:],
        lambda member: member.store.gather("left", "x", is_of_living=True).texts(5.0),
    )
    assert texts == [[None, "x", "x"]] * 2


def restarted(member: Membership, lost: list[int]) -> None:
    wait_until(lambda: try_restart(member, lost), "the store")


def try_restart(member: Membership, lost: list[int]) -> bool:
    try:
        member.restart_store(lost)
    except ConnectionFailed:
        return False
    return True
