"""Unauthenticated peers do no harm to a mesh, and are logged."""

from __future__ import annotations

import logging
import socket

import pytest

from tests.harness.timing import wait_until
from tests.transport.workers import FileStore, Worker, by_sockets, run
from tfdp.communication.connection import acceptor
from tfdp.communication.connection.handshake import (
    GREETING_BYTES,
    UnauthenticatedPeer,
    authenticate,
    dial_steps,
)
from tfdp.communication.transport import TransportError
from tfdp.communication.transport.mesh import _CLAIM


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> Lines:
    handler = Lines()
    logging.getLogger("tfdp.transport").addHandler(handler)
    return handler


def dialled(mesh, use_unix: bool) -> socket.socket:
    there = mesh.addresses
    if use_unix:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{there.unix_name}")
    else:
        sock = socket.create_connection((there.ip, there.port))
    sock.settimeout(5.0)
    return sock


def wrong_claim(sock: socket.socket) -> None:
    steps = dial_steps("guessed", "worker 0", bytes(_CLAIM.size))
    with pytest.raises(UnauthenticatedPeer, match="does not have this job's secret"):
        authenticate(sock, steps, 5.0)


def claim_without_proof(sock: socket.socket) -> None:
    sock.sendall(bytes(32 + _CLAIM.size + 32))


ACTS = {
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000),
    "nothing": lambda sock: None,
    "half": lambda sock: sock.sendall(b"1" * 10),
    "a wrong claim": wrong_claim,
    "a claim without a proof": claim_without_proof,
    "the end": lambda sock: sock.close(),
}
REASONS = {
    "garbage": "it does not have this job's secret",
    "nothing": "authentication timed out",
    "half": "authentication timed out",
    "a wrong claim": "it does not have this job's secret",
    "a claim without a proof": "it does not have this job's secret",
    "the end": "it closed the connection",
}


def meet_unauthenticated(worker: Worker, act: str) -> list[str]:
    acceptor._PROOF_SECONDS = 0.2
    handler = logged()
    mesh = worker.mesh()
    outsider = dialled(mesh, worker.wire == "unix") if worker.rank == 0 else None
    if outsider is not None:
        ACTS[act](outsider)
        worker.say("strange")
    worker.wait_for("strange")
    # The workers do not wait for it.
    connection = mesh.connect(1 - worker.rank, "lane")
    connection.send(b"own")
    received = bytearray(3)
    connection.receive_into(received)
    assert received == b"own"
    if outsider is not None:
        wait_until(lambda: handler.lines, "a line of the log", 5.0)
        if outsider.fileno() >= 0:
            with_end = b""
            try:
                while part := outsider.recv(4096):
                    with_end += part
            except ConnectionResetError:
                pass
            assert not any(with_end[GREETING_BYTES:])
            outsider.close()
    mesh.close()
    return handler.lines


@by_sockets
@pytest.mark.parametrize("act", ACTS)
def test_an_unauthenticated_peer_is_refused_and_logged(act, wire):
    (line,), others = run(2, meet_unauthenticated, act, wire=wire)
    assert line.startswith("Refused a connection from ")
    assert REASONS[act] in line
    assert others == []


def meet_crowd(worker: Worker) -> tuple[int, str]:
    """More unauthenticated peers than are allowed; a worker still comes through."""
    acceptor._PROOF_SECONDS = 0.3
    acceptor._MAX_UNAUTHENTICATED = 8
    handler = logged()
    mesh = worker.mesh(timeout_seconds=5.0)
    crowd = [dialled(mesh, False) for _ in range(40)] if worker.rank == 0 else []
    worker.say(f"here {worker.rank}")
    worker.wait_for("here 0")
    mesh.connect(1 - worker.rank, "lane")
    for outsider in crowd:
        outsider.close()
    mesh.close()
    return len(handler.lines), "".join(handler.lines)


def test_a_crowd_is_logged_a_few_times_only():
    (count, text), _ = run(2, meet_crowd)
    assert acceptor._FULL_LOG <= count < 20
    assert "too many connections" in text


class OtherSecret(FileStore):
    def get(self, key: str, timeout_seconds: float) -> str:
        text = super().get(key, timeout_seconds)
        return "00" * 32 if key.endswith("secret") else text


def wrong_secret(worker: Worker) -> str:
    store = worker.store
    if worker.rank == 1:
        store = OtherSecret(store._directory)
    worker = Worker(worker.rank, 2, store, worker.wire)
    mesh = worker.mesh(timeout_seconds=0.5)
    with pytest.raises(TransportError) as caught:
        mesh.connect(1 - worker.rank, "lane")
    worker.say(f"done {worker.rank}")
    worker.wait_for(f"done {1 - worker.rank}")
    mesh.close()
    return str(caught.value)


def test_workers_with_other_secrets_do_not_connect():
    waiting, dialling = run(2, wrong_secret, wire="tcp")
    assert "Worker 1 has not connected to worker 0" in waiting
    assert "does not have this job's secret" in dialling


def impostor(worker: Worker) -> str:
    """What listens where worker 0 said it does is something else."""
    listening = socket.create_server(("127.0.0.1", 0))
    if worker.rank == 0:
        store = worker.store
        mesh = worker.mesh()
        text = store.get("transport/address/0", 1.0)
        port = listening.getsockname()[1]
        store.put(
            "transport/address/0",
            text.replace(f'"port": {mesh.addresses.port}', f'"port": {port}'),
        )
        worker.say("moved")
        accepted, _ = listening.accept()
        accepted.sendall(b"SSH-2.0-OpenSSH_9.2" * 10)
        worker.wait_for("done")
        return ""
    worker.wait_for("moved")
    mesh = worker.mesh()
    with pytest.raises(
        TransportError, match="does not have this job's secret"
    ) as caught:
        mesh.connect(0, "lane")
    worker.say("done")
    return str(caught.value)


def test_a_worker_does_not_trust_what_it_dials():
    assert "the address of worker 0, does not have" in run(2, impostor, wire="tcp")[1]
