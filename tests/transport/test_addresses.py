"""A worker listens on the interface that is meant, or says what is wrong."""

from __future__ import annotations

import re
import socket

import psutil
import pytest

from tests.transport.workers import Worker, run
from tfdp.communication.transport import PeerLost, TransportError, addresses
from tfdp.communication.transport.addresses import Addresses, listening_address

NOT_HERE = "192.0.2.7"  # of TEST-NET-1, which is nobody's
has_ipv6 = pytest.mark.skipif(
    not addresses.is_own("::1"), reason="this machine has no IPv6"
)


def resolving(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    lookup = socket.getaddrinfo

    def fake(host, port, *arguments, **options):
        if host != "a-host":
            return lookup(host, port, *arguments, **options)
        return [(None, None, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", fake)


@pytest.mark.parametrize(
    ("host", "interface", "expected"),
    [
        ("localhost", None, "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("a-host", "lo", "127.0.0.1"),
        ("a-host", "127.0.0.1", "127.0.0.1"),
        pytest.param("::1", None, "::1", marks=has_ipv6),
        pytest.param("localhost", "::1", "::1", marks=has_ipv6),
    ],
)
def test_the_interface_goes_before_the_host(host, interface, expected):
    assert listening_address(host, interface) == expected


@pytest.mark.parametrize("interface", ["eth77", NOT_HERE, ""])
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(interface):
    received = re.escape(f"Received: interface={interface!r}")
    with pytest.raises(TransportError, match=received) as caught:
        listening_address("localhost", interface)
    assert "127.0.0.1 (lo)" in str(caught.value).replace(", ::1", "")


def test_a_host_name_of_another_host_is_named_with_its_addresses(monkeypatch):
    resolving(monkeypatch, NOT_HERE, "192.0.2.8")
    with pytest.raises(TransportError) as caught:
        listening_address("a-host", None)
    message = str(caught.value)
    assert message.startswith(
        "The host of this worker, 'a-host', resolves to 192.0.2.7, 192.0.2.8 here, "
        "which is not an address of this host; its addresses are 127.0.0.1"
    )
    assert "interface=" in message


def test_a_host_name_that_does_not_resolve_is_named():
    with pytest.raises(TransportError, match=r"'no such host\.', does not resolve"):
        listening_address("no such host.", None)


def test_no_worker_listens_on_all_interfaces():
    with pytest.raises(TransportError, match="not an address of this host"):
        listening_address("0.0.0.0", None)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.5", "fe80::1"]}, "10.0.0.5"),
        ({"lo": ["127.0.0.1"]}, "127.0.0.1"),
    ],
)
def test_debians_entry_for_the_own_name_does_not_hide_the_host(
    monkeypatch, own, expected
):
    resolving(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(addresses, "interface_addresses", lambda: own)
    found = listening_address("a-host", None)
    assert found == (expected if len(own) > 1 else "127.0.1.1")


def test_of_several_interfaces_none_is_guessed(monkeypatch):
    resolving(monkeypatch, "127.0.1.1")
    own = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "eth1": ["10.1.0.5"]}
    monkeypatch.setattr(addresses, "interface_addresses", lambda: own)
    with pytest.raises(TransportError, match=r"several other .*10\.1\.0\.5 \(eth1\)"):
        listening_address("a-host", None)


def listen(worker: Worker, host: str, interface: str | None) -> list[tuple]:
    mesh = worker.mesh(host=host, interface=interface, use_unix=False)
    connection = mesh.connect(1 - worker.rank, "lane")
    connection.send(b"1")
    connection.receive_into(bytearray(1))
    found = [
        entry.laddr
        for entry in psutil.Process().net_connections("inet")
        if entry.status == psutil.CONN_LISTEN
    ]
    assert [tuple(address) for address in found] == [
        (mesh.addresses.ip, mesh.addresses.port)
    ]
    worker.meet("end")
    return found[0].ip


@pytest.mark.parametrize(
    ("host", "interface"),
    [("localhost", None), pytest.param("::1", None, marks=has_ipv6)],
)
def test_workers_connect_on_the_only_address_that_they_listen_on(host, interface):
    expected = listening_address(host, interface)
    assert run(2, listen, host, interface) == [expected] * 2


def cannot_reach(worker: Worker, ip: str, machine: str | None) -> str:
    mesh = worker.mesh(timeout_seconds=0.4)
    there = mesh.addresses
    if worker.rank == 0:  # says that it listens where it does not
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            other = Addresses(
                "a-host",
                ip,
                closed.getsockname()[1],
                there.unix_name,
                machine or there.machine,
            )
            worker.store.put("transport/address/0", other.to_json())
            worker.say("moved")
            worker.wait_for("done")
        return str(other)
    worker.wait_for("moved")
    with pytest.raises(TransportError) as caught:
        mesh.connect(0, "lane")
    worker.say("done")
    return str(caught.value)


@pytest.mark.parametrize("ip", ["127.0.0.1", NOT_HERE])
def test_a_port_that_cannot_be_reached_is_named_with_both_ends(ip):
    where, message = run(2, cannot_reach, ip, None, wire="tcp")
    assert message.startswith("Worker 1 (127.0.0.1) cannot reach worker 0 at " + where)
    assert "firewall" in message


def test_a_loopback_address_of_another_host_is_named():
    where, message = run(2, cannot_reach, "127.0.0.1", "elsewhere")
    assert message.startswith(f"Worker 0 listens only at {where}, which no other host")
    assert "'a-host'" in message


def wait_in_vain(worker: Worker) -> str:
    mesh = worker.mesh(timeout_seconds=0.3)
    with pytest.raises((TransportError, PeerLost)) as caught:
        mesh.connect(2, "lane")
    return str(caught.value)


def test_a_worker_that_does_not_come_is_named():
    first, second = run(2, wait_in_vain)
    assert first.startswith("Worker 2 has not connected to worker 0 (127.0.0.1:")
    assert second.startswith("Worker 2 has not connected to worker 1 (127.0.0.1:")
