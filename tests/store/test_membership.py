"""Who joins a job, who does not, and what each is told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.harness.timing import wait_until, within
from tests.store.clusters import cluster_of, members_of, of_rank, on_all
from tfdp.communication.cluster import Cluster, free_ports, ports
from tfdp.communication.cluster.address import join_address, split_address
from tfdp.communication.cluster.own_addresses import is_own, own_addresses
from tfdp.communication.connection.handshake import authenticate, dial_steps
from tfdp.communication.connection.secret import VARIABLE
from tfdp.communication.store import (
    Admission,
    Membership,
    Store,
    admission,
    ask_job,
    client,
    replication,
)
from tfdp.communication.store import membership as module

SECRET = "0123456789abcdef"


@contextlib.contextmanager
def member_of(cluster: Cluster, rank: int) -> Iterator[Membership]:
    with member_of_this(Membership(of_rank(cluster, rank))) as member:
        yield member


def failure_of_join(member: Membership, seconds: float = 0.5) -> BaseException | None:
    try:
        member.join(seconds)
    except (TimeoutError, ValueError) as error:
        return error
    return None


@pytest.fixture
def outside() -> Cluster:
    """A cluster of two workers that connect by TCP, with a secret."""
    addresses = own_addresses()
    if not addresses:
        pytest.skip("this machine has no address but loopback")
    workers = tuple(join_address(addresses[0], port) for port in free_ports(2))
    return Cluster(workers, secret=SECRET)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(module.user_code, "warn", lambda text, **_: texts.append(text))
    return texts


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster, int], Any]:
    """Makes a second member of a rank, whose port is free as on another host."""

    def create(cluster: Cluster, rank: int) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(module, "listen", lambda address: [])
            patch.setattr(module, "unix_socket_name", lambda _: f"\0{os.urandom(8)!r}")
            return member_of_this(Membership(of_rank(cluster, rank)))

    return create


@contextlib.contextmanager
def member_of_this(member: Membership) -> Iterator[Membership]:
    try:
        yield member
    finally:
        member.leave()


def test_a_missing_worker_is_named_by_all_that_are_there():
    cluster = cluster_of(3)
    with member_of(cluster, 0) as first, member_of(cluster, 2) as last:
        for error in on_all([first, last], failure_of_join):
            assert isinstance(error, TimeoutError)
            assert str(error).startswith(
                f"Waited 0 s for worker 1 ({cluster.workers[1]}), which did not start. "
                "Start every worker of TF_CONFIG"
            )


def test_without_the_first_worker_the_others_name_it():
    cluster = cluster_of(3)
    with member_of(cluster, 1) as second:
        text = str(failure_of_join(second))
    assert text.startswith(f"Waited 0 s for worker 0 ({cluster.workers[0]}), which did")
    assert "(Connection refused)" in text


def test_a_host_name_that_does_not_resolve_is_said_to_who_waits_for_it():
    port = free_ports(1)[0]
    cluster = Cluster(("nowhere.invalid:1", f"localhost:{port}"), secret=SECRET)
    with member_of(cluster, 1) as second:
        text = str(failure_of_join(second))
    assert (
        "worker 0 (nowhere.invalid:1), which did not start (its host name does" in text
    )


def test_of_two_addresses_of_a_host_name_the_one_that_answers_is_used(
    outside: Cluster, monkeypatch: pytest.MonkeyPatch
):
    resolve = socket.getaddrinfo
    nobody = free_ports(1)[0]

    def resolve_twice(host, port, *args, **options):
        return [
            *resolve(host, nobody, *args, **options),
            *resolve(host, port, *args, **options),
        ]

    with member_of(outside, 0) as first, member_of(outside, 1) as second:
        monkeypatch.setattr(socket, "getaddrinfo", resolve_twice)
        on_all([first, second], lambda member: member.join(20))


@pytest.mark.parametrize("answers", ["refuses", "accepts and says nothing"])
def test_a_name_of_two_addresses_leads_to_the_next_host(
    outside: Cluster, monkeypatch: pytest.MonkeyPatch, answers: str
):
    resolve, host = socket.getaddrinfo, Membership.host
    # Bound and without a listener, the port refuses connections, and no other process
    # can listen there.
    held = socket.socket()
    held.bind(("", 0))
    if answers != "refuses":
        held.listen()
    nobody = held.getsockname()[1]

    def resolve_twice(name, port, *args, **options):
        return [
            *resolve(name, port, *args, **options),
            *resolve(name, nobody, *args, **options),
        ]

    def host_late(member: Membership, contents) -> None:
        time.sleep(0.3)
        host(member, contents)

    name, _ = split_address(outside.workers[0])
    workers = tuple(join_address(name, port) for port in free_ports(3))
    with held, members_of(Cluster(workers, secret=SECRET)) as members:
        monkeypatch.setattr(socket, "getaddrinfo", resolve_twice)
        monkeypatch.setattr(Membership, "host", host_late)
        members[0].leave()
        members[2].store.put("key", "text")
        assert members[2].store.host == 1


def test_a_worker_that_has_started_again_while_all_join_is_not_lost():
    cluster = cluster_of(3)
    with member_of(cluster, 0) as first, ThreadPoolExecutor() as pool:
        with member_of(cluster, 1) as gone:
            failure_of_join(gone)
        joining = pool.submit(first.join, 20)
        with member_of(cluster, 1) as again, member_of(cluster, 2) as last:
            on_all([again, last], lambda member: member.join(20))
            joining.result(20)
            beat = {"is_notable": False, "is_news": False, "wants_all": False}
            assert last.store.beat("", **beat)["lost"] == []


def test_who_waits_for_long_is_told_for_whom(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_WARN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.05)
    cluster = cluster_of(2)
    with member_of(cluster, 0) as first:
        failure_of_join(first)
    start = f"Waiting for worker 1 ({cluster.workers[1]}) to start. Start every worker"
    assert any(text.startswith(start) for text in warned)


def test_a_first_worker_that_starts_again_finds_the_others_waiting():
    cluster = cluster_of(2)
    with member_of(cluster, 1) as second, ThreadPoolExecutor() as pool:
        joining = pool.submit(second.join, 20)
        with member_of(cluster, 0) as gone:
            gone.connect(0)
        with member_of(cluster, 0) as first:
            first.join(20)
            joining.result(20)


def test_a_worker_that_joins_twice_is_told_so(elsewhere):
    cluster = cluster_of(3)
    with (
        member_of(cluster, 0),
        member_of(cluster, 1) as one,
        elsewhere(cluster, 1) as other,
    ):
        failure_of_join(one)
        text = str(failure_of_join(other))
    assert "(another process has joined the job as this worker)" in text


def test_a_worker_that_starts_again_alone_is_told_that_the_job_has_lost_it(elsewhere):
    cluster = cluster_of(2)
    with members_of(cluster) as members:
        members[1].leave()
        with elsewhere(cluster, 1) as again:
            text = str(failure_of_join(again))
    assert "(the job has started, and has lost this worker)" in text


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_worker_of_another_cluster_is_refused(elsewhere, secret: str | None):
    cluster = Cluster(cluster_of(2).workers, secret=secret)
    larger = (*cluster.workers, "127.0.0.1:1")
    with (
        member_of(cluster, 0),
        elsewhere(Cluster(larger, secret=secret), 2) as other,
    ):
        error = failure_of_join(other, 20)
    assert isinstance(error, ValueError)
    assert "it does not have this job's secret. Check" in str(error)
    assert "whether the cluster of TF_CONFIG and" in str(error)


def test_workers_with_different_versions_of_tfdp_are_told_so_all(
    monkeypatch: pytest.MonkeyPatch,
):
    versions = iter(["9.1", "9.2"])
    monkeypatch.setattr(module, "own_version", lambda: next(versions))
    cluster = cluster_of(2)
    with member_of(cluster, 0) as first, member_of(cluster, 1) as second:
        errors = on_all([first, second], lambda member: failure_of_join(member, 20))
    for error in errors:
        assert isinstance(error, ValueError)
        assert re.fullmatch(
            r"Workers have different tfdp version: worker 0 has 9\.[12], worker 1 has "
            r"9\.[12]\. Use the same on all\.",
            str(error),
        )


def test_a_port_that_is_taken_is_refused_at_once():
    cluster = cluster_of(2)
    with member_of(cluster, 0), pytest.raises(ValueError, match="is already taken by"):
        Membership(cluster)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 400 Bad Request", "it is another service"),
        (b"tfdp/0 store".ljust(64), "it runs another version of tfdp"),
        (b"tfdp/2 worker 0".ljust(64), "it is another service"),
    ],
)
def test_another_program_on_the_port_of_the_first_worker_is_named(
    outside: Cluster, greeting: bytes, words: str
):
    with greeting_with(greeting, outside.workers[0]), member_of(outside, 1) as second:
        error = failure_of_join(second, 20)
    assert isinstance(error, ValueError)
    assert str(error).startswith(
        f"Another program listens on the port of worker 0 ({outside.workers[0]}): "
        f"{words}. Check which process has it"
    )


def test_a_program_that_says_nothing_is_waited_for_and_named(
    outside: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Membership.connect, "__defaults__", (0.2,))
    with greeting_with(b"", outside.workers[0]), member_of(outside, 1) as second:
        assert "(no answer)" in str(failure_of_join(second))


@contextlib.contextmanager
def greeting_with(greeting: bytes, address: str) -> Iterator[None]:
    """A program that greets all who connect, and reads nothing."""
    with socket.create_server(split_address(address)) as server:
        connections = []

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in connections:
            connection.close()


def test_a_job_of_another_secret_is_named(outside: Cluster):
    other = Cluster(outside.workers, task_index=1, secret=SECRET + "x")
    with member_of(outside, 0), member_of_this(Membership(other)) as second:
        error = failure_of_join(second, 20)
    assert "it does not have this job's secret" in str(error)


def test_the_secret_comes_from_the_launcher_or_from_a_file(
    outside: Cluster, tmp_path, monkeypatch: pytest.MonkeyPatch, warned: list[str]
):
    file = tmp_path / "secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    monkeypatch.setenv(VARIABLE, str(file))
    bare = Cluster(outside.workers, task_index=1)
    assert not Admission.of(bare).is_local
    with (
        member_of(outside, 0) as first,
        member_of_this(Membership(bare)) as second,
    ):
        on_all([first, second], lambda member: member.join(20))
    assert warned == []


def test_workers_without_a_secret_join_and_the_first_one_warns(
    outside: Cluster, monkeypatch: pytest.MonkeyPatch, warned: list[str]
):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(admission, "_is_one_machine", lambda hosts: False)
    with members_of(Cluster(outside.workers)):
        pass
    assert len(warned) == 1
    assert f"any process that reaches {outside.workers[0]} and knows" in warned[0]


def test_a_stranger_on_this_machine_gets_nothing_by_tcp(warned: list[str]):
    cluster = cluster_of(2)
    with members_of(cluster) as members:
        with socket.create_connection(split_address(cluster.workers[0]), 5) as sock:
            secret = members[0]._admission.secret
            steps = dial_steps(secret, "store", admission.CLAIM.pack(1, 0, b""))
            authenticate(sock, steps, 5)
            assert sock.recv(100) == b""
        members[1].store.put("key", "text")
    assert warned == []


def test_the_process_of_another_user_is_no_host(monkeypatch: pytest.MonkeyPatch):
    cluster = cluster_of(2)
    with member_of(cluster, 0), member_of(cluster, 1) as second:
        monkeypatch.setattr(admission, "is_own_user", lambda sock: False)
        error = failure_of_join(second, 20)
    assert "it belongs to another user" in str(error)


def test_workers_of_one_machine_named_by_its_address_need_no_secret(
    outside: Cluster, warned: list[str]
):
    cluster = Cluster(outside.workers)
    assert Admission.of(cluster).is_local
    with members_of(cluster) as members:
        members[1].store.put("key", "text")
    assert warned == []


def test_a_name_of_the_unix_socket_that_is_taken_is_refused_in_one_sentence():
    cluster = cluster_of(2)
    _, port = split_address(cluster.workers[0])
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0tfdp-store-{port}")
        words = rf"Unix socket @tfdp-store-{port}, on which .* Address already in use"
        with pytest.raises(ValueError, match=words):
            Membership(cluster)
    with member_of(cluster, 0):
        pass


@pytest.mark.filterwarnings("ignore:Waiting for worker")  # on a busy machine
def test_strangers_who_stay_silent_keep_no_worker_out(outside: Cluster):
    target = split_address(outside.workers[0])
    with member_of(outside, 0) as first, member_of(outside, 1) as second:
        strangers = [socket.create_connection(target, 5) for _ in range(200)]
        on_all([first, second], lambda member: member.join(20))
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "[::1]"])
def test_workers_of_one_machine_listen_on_loopback_only(host: str):
    if host != "localhost" and not is_own(host.strip("[]")):
        pytest.skip("this machine has no IPv6")
    cluster = cluster_of(2, host)
    with members_of(cluster) as members:
        members[1].store.put("key", "text")
        _, port = split_address(cluster.workers[1])
        for address in own_addresses():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), 5)


def test_a_worker_listens_at_each_address_of_its_name_and_on_one_machine_by_unix(
    outside: Cluster, monkeypatch: pytest.MonkeyPatch
):
    def listened(cluster: Cluster) -> list[object]:
        with member_of(cluster, 0) as member:
            names = [sock.getsockname() for sock in member._acceptor._listening]
        return [name if isinstance(name, bytes) else name[:2] for name in names]

    host, port = split_address(outside.workers[0])
    assert listened(outside) == [(host, port)]
    found = {host: ["127.0.0.1", "127.0.0.2"], "127.0.0.1": ["127.0.0.1"]}
    monkeypatch.setattr(ports, "addresses_of", found.__getitem__)
    monkeypatch.setattr(ports, "is_local_name", lambda host: True)
    assert listened(outside) == [("127.0.0.1", port), ("127.0.0.2", port)]
    cluster = cluster_of(2)
    _, port = split_address(cluster.workers[0])
    unix = f"\0tfdp-store-{port}".encode()
    assert listened(cluster) == [("127.0.0.1", port), unix]


def test_a_first_worker_that_stands_still_ends_no_wait_of_those_that_join(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.1)
    cluster = cluster_of(3)
    with within(10), member_of(cluster, 0) as first, member_of(cluster, 1) as second:
        first.server._serve = lambda member, request: None
        error = failure_of_join(second)
        assert "for worker 0 (" in str(error)
        del first.server._serve


def test_a_standby_that_is_suspended_keeps_nobody_from_joining(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(replication, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.1)
    acknowledge = Store._acknowledge
    monkeypatch.setattr(
        Store,
        "_acknowledge",
        lambda store, number: store.rank == 1 or acknowledge(store, number),
    )
    with within(10), members_of(cluster_of(3)) as members:
        members[2].store.put("key", "text")


def test_who_has_left_does_not_leave_again():
    with members_of(cluster_of(2)) as members:
        left: list[int] = []
        members[1].leaving.append(lambda: left.append(1))
        members[1].leave()
        members[1].leave()
    assert left == [1]


def test_a_process_leaves_a_cluster_and_joins_another():
    for _ in range(2):
        with members_of(cluster_of(2)) as members:
            prefixes = [member.store.new_prefix() for member in members]
            assert prefixes == ["tfdp/0", "tfdp/0"]
    with pytest.raises(ConnectionError, match="has left the cluster of this strategy"):
        members[0].store.put("key", "text")


def test_a_process_that_comes_later_learns_of_the_job_and_applies():
    cluster = cluster_of(3)
    user_state = random.getstate()  # initial weights follow from the user's seed
    assert ask_job(of_rank(cluster, 2)) is None  # nobody listens
    assert random.getstate() == user_state
    with members_of(dataclasses.replace(cluster, workers=cluster.workers[:2])) as both:
        for member in both:
            member.facts["epochs"] = "3"
        # Another cluster has another secret.
        assert ask_job(of_rank(cluster, 2)) is None
    with members_of(cluster) as members:
        members[2].leave()
        state = ask_job(of_rank(cluster, 2))
        assert state is not None
        assert (state.generation, tuple(state.workers)) == (0, cluster.workers)
        assert members[0].applicants() == []
        assert ask_job(of_rank(cluster, 2), applies=True) is not None
        assert members[0].applicants() == []  # its place is not free yet
        assert members[1].applicants(lost=[2]) == [cluster.workers[2]]


def test_a_host_that_is_lost_is_followed_if_its_connection_ends():
    with members_of(cluster_of(2)) as members:
        store = members[1].store
        wait_until(lambda: store._standby == 1, "a standby", 10.0)
        with ThreadPoolExecutor() as pool:
            given_up = pool.submit(store.give_up, 0, "worker 0 is lost")
            members[0].leave()
            given_up.result(10.0)
        store.put("key", "text")  # the host is this worker by now
        assert store.host == 1
    with members_of(cluster_of(2)) as members:
        members[1].store.give_up(0, "worker 0 is lost")
        with pytest.raises(ConnectionError, match="worker 0 is lost"):
            members[1].store.put("key", "text")


def test_a_standby_hosts_no_store_that_it_has_given_up():
    with members_of(cluster_of(2)) as members:
        store = members[1].store
        wait_until(lambda: store._standby == 1, "a standby", 10.0)
        # As after the loss of the host: another store takes the place of this one.
        store.fail("the store is lost")
        members[0].leave()
        name = "tfdp store follows"
        wait_until(lambda: store.connection is None, "the end of the host", 10.0)
        for thread in [t for t in threading.enumerate() if t.name == name]:
            thread.join(10.0)
        assert members[1].server is None


def test_a_process_at_a_new_address_applies_to_a_job_that_may_grow():
    settings = {"elastic": 1, "secret": "0123456789abcdef"}
    cluster = dataclasses.replace(cluster_of(3), **settings)
    first = dataclasses.replace(cluster, workers=cluster.workers[:2])
    with members_of(first) as members:
        state = ask_job(of_rank(cluster, 2), applies=True)
        assert state is not None
        assert members[0].applicants() == [cluster.workers[2]]
        other = dataclasses.replace(cluster, secret="f" * 16)
        assert ask_job(of_rank(other, 2), applies=True) is None


@pytest.mark.parametrize("absent", [[0], [0, 1], [0, 2]])
def test_the_next_cluster_of_a_job_forms_without_those_that_do_not_come(
    monkeypatch, absent
):
    monkeypatch.setattr(module, "_LOST_SECONDS", 0.5)
    cluster = cluster_of(4)
    members = [
        Membership(of_rank(cluster, rank), cluster, generation=1)
        for rank in range(4)
        if rank not in absent
    ]
    try:
        on_all(members, lambda member: member.join(20.0))
        assert [member.absent for member in members] == [absent] * len(members)
        assert members[0].server is not None
        state = ask_job(of_rank(cluster, 0))
        assert state is not None
        assert state.generation == 1
    finally:
        on_all(members, Membership.leave)
