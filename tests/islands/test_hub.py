"""The hub and its members, on threads of one process and without TensorFlow."""

from __future__ import annotations

import collections.abc
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.harness.timing import wait_until, within
from tfdp.communication.connection.acceptor import Acceptor
from tfdp.features.islands.hub import Hub
from tfdp.features.islands.hub_clients import HubClient, HubLost, LauncherLink, connect
from tfdp.features.islands.hub_connection import SERVICE, HubConnection
from tfdp.features.islands.island import Island

SECRET = "0123456789abcdef"
SETTINGS = {"sync_every": 4, "min_participants": None, "patience_seconds": 0.2}
DEADLINE_SECONDS = 20.0
Open = collections.abc.Callable[..., Hub]


@pytest.fixture
def open_hub() -> collections.abc.Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def make(count: int, join_seconds: float = DEADLINE_SECONDS) -> Hub:
            server = socket.create_server(("127.0.0.1", 0))
            return stack.enter_context(Hub(server, SECRET, count, join_seconds))

        yield make


def island(hub: Hub, index: int, secret: str = SECRET) -> Island:
    return Island(index, 4, f"127.0.0.1:{hub.port}", secret)


def at_once(*functions: collections.abc.Callable) -> list:
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.result(DEADLINE_SECONDS) for future in futures]


def join(hub: Hub, *indices: int, settings: dict | None = None) -> list[HubClient]:
    """Members that join at once; each begins with its own index as the state."""
    members = [HubClient(island(hub, index)) for index in indices]
    joined = at_once(
        *(
            lambda m=member, i=index: m.join(
                settings or SETTINGS, [np.full(2, i, "f4")]
            )
            for member, index in zip(members, indices, strict=True)
        )
    )
    for reply in joined:
        np.testing.assert_array_equal(reply.state[0], np.full(2, min(indices)))
    return members


def bring(member: HubClient, version: int, value: float, samples: float = 1.0):
    return member.exchange(version, samples, [np.full((2, 1), value, "f4")])


def test_an_exchange_is_the_mean_by_samples_and_one_keeps_its_state(open_hub):
    first, second = join(open_hub(2), 0, 1)
    replies = at_once(
        lambda: bring(first, 0, 1.0, samples=3.0), lambda: bring(second, 0, 5.0)
    )
    for reply in replies:
        np.testing.assert_allclose(reply.mean[0], np.full((2, 1), 2.0))
        assert (reply.version, reply.participants, reply.is_behind) == (1, 2, False)
    assert [reply.keeps for reply in replies] == [True, False]


def test_who_joins_later_gets_the_state_that_was_kept_and_the_means_since(open_hub):
    hub = open_hub(2)
    first, second = join(hub, 0, 1)
    for version in range(3):
        (reply, _) = at_once(
            lambda v=version: bring(first, v, v), lambda v=version: bring(second, v, v)
        )
        if version == 1:
            first.keep(reply.version, [np.array([7.0, 7.0], "f4")])
    # What is kept is not answered: the hub has it when this island is served again.
    late = HubClient(island(hub, 2))
    reply = late.join(SETTINGS, [np.zeros(2, "f4")])
    assert reply.version == 3
    np.testing.assert_array_equal(reply.state[0], [7.0, 7.0])
    np.testing.assert_array_equal(np.ravel(reply.means), [2.0, 2.0])


def test_nobody_waits_for_an_island_that_has_gone(open_hub):
    first, second = join(open_hub(2), 0, 1)
    second.close()
    reply = bring(first, 0, 1.0)
    assert reply.participants == 1
    # Also where it goes while it is waited for.
    hub = open_hub(2)
    first, second = join(hub, 0, 1)
    threading.Timer(0.3, second.close).start()
    assert bring(first, 0, 1.0).participants == 1


def _end_with_a_child(hub: Hub) -> None:
    """Joins as island 1, and ends while a process that it has forked lives."""
    try:
        HubClient(island(hub, 1)).join(SETTINGS, [np.full(2, 1, "f4")])
        if os.fork() == 0:
            time.sleep(6.0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(1)


def test_an_island_that_was_killed_has_gone_though_a_process_it_forked_lives(open_hub):
    hub = open_hub(2)
    pid = os.fork()
    if pid == 0:
        _end_with_a_child(hub)
    (first,) = join(hub, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with within(3.0):
        assert bring(first, 0, 1.0).participants == 1


def test_without_least_an_exchange_waits_for_all_that_are_there(open_hub):
    first, second = join(open_hub(2), 0, 1)
    begin = time.monotonic()

    def late() -> object:
        time.sleep(0.6)  # patience is over
        return bring(second, 0, 3.0)

    reply, _ = at_once(lambda: bring(first, 0, 1.0), late)
    assert time.monotonic() - begin > 0.5
    np.testing.assert_allclose(reply.mean[0], np.full((2, 1), 2.0))


def test_with_least_a_late_one_is_left_out_and_counts_in_the_next(open_hub):
    hub = open_hub(2)
    first, second = join(hub, 0, 1, settings={**SETTINGS, "min_participants": 1})
    reply = bring(first, 0, 1.0)  # after patience
    assert reply.participants == 1
    first.keep(1, [np.array([4.0, 4.0], "f4")])
    wait_until(lambda: hub._rounds_by_fit[0]._state[0] == 1, "the state, not answered")
    behind = bring(second, 0, 9.0)
    assert behind.version == 1
    assert behind.is_behind
    np.testing.assert_array_equal(behind.state[0], [4.0, 4.0])
    assert behind.means == []
    replies = at_once(lambda: bring(first, 1, 0.0), lambda: bring(second, 1, 3.0))
    for reply in replies:  # of 0, 3 and the 9 that came late
        np.testing.assert_allclose(reply.mean[0], np.full((2, 1), 4.0))


def test_an_exchange_of_too_few_waits_for_one_that_comes_back(open_hub):
    hub = open_hub(2)
    settings = {**SETTINGS, "min_participants": 2}
    first, second = join(hub, 0, 1, settings=settings)
    second.close()

    def back() -> object:
        time.sleep(0.5)
        member = HubClient(island(hub, 1))
        version = member.join(settings, [np.zeros(2, "f4")]).version
        return bring(member, version, 3.0)

    reply, _ = at_once(lambda: bring(first, 0, 1.0), back)
    assert reply.participants == 2


def test_the_first_wait_for_the_others_but_not_for_those_that_have_ended(open_hub):
    hub = open_hub(2)
    member = HubClient(island(hub, 0))
    threading.Timer(0.3, hub.ended, [1]).start()
    begin = time.monotonic()
    member.join(SETTINGS, [np.zeros(2, "f4")])
    assert 0.2 < time.monotonic() - begin < DEADLINE_SECONDS / 2
    with within(DEADLINE_SECONDS / 2):
        HubClient(island(open_hub(2, join_seconds=0.3), 0)).join(
            SETTINGS, [np.zeros(2)]
        )


def test_islands_of_other_settings_are_refused_with_what_differs(open_hub):
    hub = open_hub(1)
    join(hub, 0)
    other = HubClient(island(hub, 1))
    with pytest.raises(ValueError, match=r"sync_every is 8 here, and 4 on others"):
        other.join({**SETTINGS, "sync_every": 8}, [np.zeros(2, "f4")])


def test_unauthenticated_peers_change_nothing(open_hub, monkeypatch):
    monkeypatch.setattr("tfdp.communication.connection.acceptor._PROOF_SECONDS", 1)
    hub = open_hub(2)
    with pytest.raises(
        RuntimeError, match="not the hub of these islands: it does not have"
    ):
        HubClient(island(hub, 0, secret="another secret!!"))
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, b""):
        with socket.create_connection(("127.0.0.1", hub.port)) as sock:
            sock.sendall(data)
    silent = socket.create_connection(("127.0.0.1", hub.port))
    with silent:
        first, second = join(hub, 0, 1)
        replies = at_once(lambda: bring(first, 0, 1.0), lambda: bring(second, 0, 3.0))
        assert [reply.participants for reply in replies] == [2, 2]
        silent.settimeout(DEADLINE_SECONDS)
        while silent.recv(1024):  # until the hub has enough
            pass


def test_a_member_that_breaks_the_rules_is_gone_and_no_other_is(open_hub):
    hub = open_hub(2)
    first, second = join(hub, 0, 1)
    second._connection.send(b"no message")
    assert bring(first, 0, 1.0).participants == 1


def test_without_its_hub_an_island_says_so(open_hub, monkeypatch):
    hub = open_hub(1)
    (member,) = join(hub, 0)
    hub.__exit__()
    with pytest.raises(RuntimeError, match=r"to the islands' hub .* was lost"):
        bring(member, 0, 1.0)
    monkeypatch.setattr("tfdp.features.islands.hub_clients._CONNECT_SECONDS", 0.3)
    with pytest.raises(RuntimeError, match="cannot be reached"):
        HubClient(Island(0, 2, f"127.0.0.1:{hub.port}", SECRET))


def test_all_dtypes_and_shapes_travel_as_they_are(open_hub):
    (member,) = join(open_hub(1), 0)
    arrays = [
        np.arange(6, dtype="f4").reshape(2, 3),
        np.float64(1.5),
        np.zeros((0, 3), "f4"),
        np.arange(12, dtype="f8").reshape(3, 4)[:, ::2],
    ]
    reply = member.exchange(0, 1.0, arrays)
    for sent, received in zip(arrays, reply.mean, strict=True):
        np.testing.assert_array_equal(received, sent)
        assert received.dtype == np.asarray(sent).dtype


def test_each_fit_has_a_meeting_of_its_own(open_hub):
    hub = open_hub(1)
    (member,) = join(hub, 0)
    bring(member, 0, 1.0)
    member.close()
    again = HubClient(island(hub, 0), fit=1)
    reply = again.join({**SETTINGS, "sync_every": 9}, [np.full(2, 5.0)])
    assert reply.version == 0
    np.testing.assert_array_equal(reply.state[0], [5.0, 5.0])
    assert reply.means == []


def test_an_island_that_comes_a_second_time_takes_its_own_place(open_hub):
    hub = open_hub(2)
    first, second = join(hub, 0, 1)
    again = HubClient(island(hub, 1))  # the connection of before is still open
    version = again.join(SETTINGS, [np.zeros(2, "f4")]).version
    replies = at_once(lambda: bring(first, 0, 1.0), lambda: bring(again, version, 3.0))
    assert [reply.participants for reply in replies] == [2, 2]
    with pytest.raises(RuntimeError, match="was lost"):
        bring(second, 1, 1.0)


def test_fewer_than_least_go_on_when_no_more_will_come(open_hub):
    settings = {**SETTINGS, "min_participants": 2}
    # One is through with its `fit`.
    first, second = join(open_hub(2), 0, 1, settings=settings)
    second.close(is_through=True)
    assert bring(first, 0, 1.0).participants == 1
    # The process of one has ended for good while it is waited for.
    hub = open_hub(2)
    first, _ = join(hub, 0, 1, settings=settings)
    with contextlib.closing(LauncherLink(island(hub, 1), [1])) as link:
        threading.Timer(0.3, link.ended, [1]).start()
        assert bring(first, 0, 1.0).participants == 1


def test_all_begin_with_the_state_that_has_most_updates(open_hub):
    hub = open_hub(3)
    members = [HubClient(island(hub, index)) for index in range(3)]
    updates = 0, 8, 8  # the first one begins anew, the others are resumed
    joined = at_once(
        *(
            lambda m=member, i=index: m.join(SETTINGS, [np.full(2, i)], updates[i])
            for index, member in enumerate(members)
        )
    )
    for reply in joined:
        np.testing.assert_array_equal(reply.state[0], [1, 1])


def test_a_hub_is_needed_until_those_that_have_been_there_have_ended(open_hub):
    hub = open_hub(2, join_seconds=0.3)
    assert not hub.is_needed
    (member,) = join(hub, 0)
    assert hub.is_needed
    member.close(is_through=True)
    assert hub.is_needed  # for its next `fit`, or after a restart
    hub.ended(0)
    wait_until(lambda: not hub.is_needed, "the hub to end", DEADLINE_SECONDS)


def test_an_island_that_gives_no_sign_of_life_has_gone(open_hub, monkeypatch):
    monkeypatch.setattr("tfdp.features.islands.hub_connection.SILENT_SECONDS", 1)
    monkeypatch.setattr("tfdp.features.islands.hub_connection.BEAT_SECONDS", 0.1)
    monkeypatch.setattr("tfdp.features.islands.hub_clients.BEAT_SECONDS", 0.1)
    first, second = join(open_hub(2), 0, 1)
    time.sleep(1.5)  # both are there, and compute
    replies = at_once(lambda: bring(first, 0, 1.0), lambda: bring(second, 0, 3.0))
    assert [reply.participants for reply in replies] == [2, 2]
    second._is_closed.set()  # as if it stood still: its connection stays open
    with within(DEADLINE_SECONDS / 2):
        assert bring(first, 1, 1.0).participants == 1
    with pytest.raises(HubLost):
        bring(second, 1, 1.0)


def test_a_hub_that_may_open_no_more_files_says_so_once(capsys, monkeypatch):
    monkeypatch.setattr("tfdp.communication.connection.acceptor._RETRY_SECONDS", 0.001)

    class Full(socket.socket):
        num_asked = 0

        def accept(self):
            self.num_asked += 1
            raise OSError(errno.EMFILE, "Too many open files")

    server = Full()
    server.bind(("127.0.0.1", 0))
    server.listen()
    with Hub(server, SECRET, 1), socket.create_connection(server.getsockname()):
        wait_until(lambda: server.num_asked >= 5, "calls of accept", DEADLINE_SECONDS)
    said = capsys.readouterr().err
    assert said.count("no island can connect: This process cannot open more files") == 1


def test_a_hub_forgets_an_island_whose_launcher_has_ended_too(open_hub, monkeypatch):
    monkeypatch.setattr("tfdp.features.islands.hub.SILENT_SECONDS", 0.5)
    settings = {**SETTINGS, "min_participants": 2}
    hub = open_hub(2)
    first, second = join(hub, 0, 1, settings=settings)
    link = LauncherLink(island(hub, 1), [1])
    wait_until(lambda: len(hub._connections) == 3, "the link", DEADLINE_SECONDS)
    second.close()
    time.sleep(0.7)
    assert hub.forget_lost() == []  # its launcher starts it again
    # As where the launcher is killed: nothing is reported.
    monkeypatch.setattr("tfdp.features.islands.hub_clients.connect", refuse)
    for connection, heard in list(hub._connections.items()):
        if heard == {1}:
            connection.close()
    found: list[int] = []

    def forget() -> None:
        wait_until(
            lambda: found.extend(hub.forget_lost()) or found,
            "an island to be lost",
            DEADLINE_SECONDS,
        )

    # An exchange of at least two has waited for it, too.
    reply, _ = at_once(lambda: bring(first, 0, 1.0), forget)
    assert reply.participants == 1
    assert found == [1]
    first.close()
    hub.ended(0)
    wait_until(lambda: not hub.is_needed, "the hub to end", DEADLINE_SECONDS)
    link.close()


def refuse(*args: object) -> None:
    raise RuntimeError("the network is cut")


def test_an_island_that_was_forgotten_may_come_back(open_hub, monkeypatch):
    monkeypatch.setattr("tfdp.features.islands.hub.SILENT_SECONDS", 0)
    hub = open_hub(2)
    first, second = join(hub, 0, 1, settings={**SETTINGS, "min_participants": 2})
    second.close()
    wait_until(
        lambda: hub.forget_lost() == [1], "island 1 to be lost", DEADLINE_SECONDS
    )
    again = HubClient(island(hub, 1))
    version = again.join(
        {**SETTINGS, "min_participants": 2}, [np.zeros(2, "f4")]
    ).version
    replies = at_once(lambda: bring(first, 0, 1.0), lambda: bring(again, version, 3.0))
    assert [reply.participants for reply in replies] == [2, 2]
    assert hub.is_needed


def test_islands_of_the_launcher_that_runs_the_hub_are_not_forgotten(monkeypatch):
    monkeypatch.setattr("tfdp.features.islands.hub.SILENT_SECONDS", 0)
    server = socket.create_server(("127.0.0.1", 0))
    with Hub(server, SECRET, 1, own=[0]) as hub:
        (member,) = join(hub, 0)
        member.close()
        wait_until(lambda: not hub._connections, "the last end", DEADLINE_SECONDS)
        assert hub.forget_lost() == []  # it starts again
        assert hub.is_needed


def test_a_link_reports_what_has_ended_while_the_hub_could_not_be_reached(
    open_hub, monkeypatch
):
    monkeypatch.setattr("tfdp.features.islands.hub_clients._REPORT_AGAIN_SECONDS", 0.05)
    num_attempts = 0

    def counted(*arguments):
        nonlocal num_attempts
        num_attempts += 1
        return connect(*arguments)

    monkeypatch.setattr("tfdp.features.islands.hub_clients.connect", counted)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    server.close()
    link = LauncherLink(Island(1, 3, f"127.0.0.1:{port}", SECRET), [1, 2])
    wait_until(lambda: num_attempts > 1, "an attempt to fail", DEADLINE_SECONDS)
    link.ended(1)
    server = socket.create_server(("127.0.0.1", port))
    with Hub(server, SECRET, 3) as hub:
        wait_until(lambda: hub._expected == {0, 2}, "a report", DEADLINE_SECONDS)
        assert hub.is_needed
        link.close()
        wait_until(lambda: not hub.is_needed, "the last report", DEADLINE_SECONDS)
        assert hub._expected == {0}
    # A hub that has gone holds up no launcher.
    with within(DEADLINE_SECONDS / 2):
        LauncherLink(Island(1, 3, f"127.0.0.1:{port}", SECRET), [1]).close()


def test_islands_that_wait_for_long_hear_that_the_hub_lives(open_hub, monkeypatch):
    monkeypatch.setattr("tfdp.features.islands.hub_connection.SILENT_SECONDS", 1)
    monkeypatch.setattr("tfdp.features.islands.hub_connection.BEAT_SECONDS", 0.1)
    monkeypatch.setattr("tfdp.features.islands.hub_clients.BEAT_SECONDS", 0.1)
    first, second = join(open_hub(2), 0, 1)

    def late() -> object:
        time.sleep(2.0)
        return bring(second, 0, 3.0)

    replies = at_once(lambda: bring(first, 0, 1.0), late)
    assert [reply.participants for reply in replies] == [2, 2]


def test_a_hub_that_stands_still_is_gone_for_its_islands_and_launchers(monkeypatch):
    """Its kernel goes on to answer for it: connections stay open."""
    monkeypatch.setattr("tfdp.features.islands.hub_connection.SILENT_SECONDS", 1)
    monkeypatch.setattr("tfdp.features.islands.hub_clients._CLOSE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Island(0, 1, f"127.0.0.1:{server.getsockname()[1]}", SECRET)

        kept: list = []
        acceptor = Acceptor(
            SECRET,
            SERVICE,
            [server],
            lambda sock, _: kept.append(HubConnection(sock)),
            lacks_files=print,
        )
        member, link = HubClient(address), LauncherLink(address, [0])
        wait_until(lambda: len(kept) == 2)
        with within(DEADLINE_SECONDS):
            with pytest.raises(HubLost, match="is suspended, or is cut off"):
                member.join(SETTINGS, [np.zeros(2, "f4")])
            # More than the kernels hold between them, which nobody takes.
            with pytest.raises(HubLost):
                member.keep(1, [np.zeros(1 << 24, "f4")])
            link.close()
        member.close()
        acceptor.close()
        for connection in kept:
            connection.close()
