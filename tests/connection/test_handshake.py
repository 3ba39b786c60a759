"""Both ends of a handshake, without sockets: what proves an end, and what does not."""

from __future__ import annotations

import pytest

from tfdp.communication.connection.handshake import (
    GREETING_BYTES,
    Authenticated,
    ConnectionFailed,
    Steps,
    UnauthenticatedPeer,
    WrongService,
    accept_steps,
    dial_steps,
)

SECRET = "0123456789abcdef"
CLAIM = b"worker 3"


def listener(secret: str = SECRET, service: str = "test") -> Steps:
    return accept_steps(secret, service, len(CLAIM))


def dialler(secret: str = SECRET, service: str = "test") -> Steps:
    return dial_steps(secret, service, CLAIM)


class End:
    """One end, which is fed in pieces, and what it has sent."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.sent = b""
        self.wanted = 0
        self.result: Authenticated | None = None
        self._advance(None)

    def feed(self, data: bytes, piece: int = 1 << 10) -> bytes:
        """Receive what is wanted of some bytes; returns what this end sends."""
        before = len(self.sent)
        while data and self.result is None:
            size = min(self.wanted, piece)
            self._advance(data[:size])
            data = data[size:]
        return self.sent[before:]

    def _advance(self, received: bytes | None) -> None:
        try:
            while isinstance(step := self.steps.send(received), bytes):
                self.sent += step
                received = None
        except StopIteration as end:
            self.result = end.value
        else:
            self.wanted = step


@pytest.mark.parametrize("piece", [1, 7, 1 << 10])
def test_ends_with_one_secret_have_the_claim_and_a_key_for_each_direction(piece):
    listens, dials = End(listener()), End(dialler())
    dials.feed(listens.feed(dials.feed(listens.sent, piece), piece), piece)
    assert listens.result is not None
    assert dials.result is not None
    assert listens.result.claim == CLAIM
    assert listens.result.incoming == dials.result.outgoing
    assert listens.result.outgoing == dials.result.incoming
    assert listens.result.incoming != listens.result.outgoing
    assert SECRET.encode() not in listens.sent + dials.sent
    again = End(listener())
    assert again.sent != listens.sent


def test_the_end_that_dials_is_told_that_its_secret_is_wrong():
    listens, dials = End(listener()), End(dialler("another secret"))
    claim = dials.feed(listens.sent)
    with pytest.raises(UnauthenticatedPeer, match="does not have this job's secret"):
        listens.feed(claim)
    with pytest.raises(UnauthenticatedPeer, match="does not have this job's secret"):
        dials.feed(listens.sent[GREETING_BYTES:])


def test_the_end_that_listens_has_to_prove_itself_too():
    dials = End(dialler())
    dials.feed(End(listener("another secret")).sent)
    with pytest.raises(UnauthenticatedPeer):
        dials.feed(b"1" * 32)


def test_a_claim_counts_for_one_greeting_only():
    first, dials = End(listener()), End(dialler())
    claim = dials.feed(first.sent)
    first.feed(claim)
    assert first.result is not None
    with pytest.raises(UnauthenticatedPeer):
        End(listener()).feed(claim)  # replayed


def test_a_proof_that_is_sent_back_proves_nothing():
    dials = End(dialler())
    claim = dials.feed(End(listener()).sent)
    with pytest.raises(UnauthenticatedPeer):
        dials.feed(claim[-32:])


@pytest.mark.parametrize("position", [0, 32, 39, 40, 71])
def test_an_altered_claim_proves_nothing(position):
    listens, dials = End(listener()), End(dialler())
    claim = bytearray(dials.feed(listens.sent))
    claim[position] ^= 1
    with pytest.raises(UnauthenticatedPeer):
        listens.feed(bytes(claim))


def test_an_altered_greeting_proves_nothing():
    listens, dials = End(listener()), End(dialler())
    greeting = bytearray(listens.sent)
    greeting[-1] ^= 1
    claim = dials.feed(bytes(greeting))
    with pytest.raises(UnauthenticatedPeer):
        listens.feed(claim)


def test_a_proof_for_one_service_is_none_for_another():
    listens, other = End(listener()), End(listener(service="other"))
    nonce = listens.sent[-32:]
    claim = End(dialler(service="other")).feed(other.sent[:-32] + nonce)
    with pytest.raises(UnauthenticatedPeer):
        listens.feed(claim)


@pytest.mark.parametrize(
    "begin", [b"SSH-2.0-OpenSSH_9.2\r\n", b"\n", b"\x16\x03", b"t!"]
)
def test_another_service_is_known_by_its_first_bytes(begin):
    with pytest.raises(WrongService) as caught:
        End(dialler()).feed(begin)
    assert (caught.value.received, caught.value.version) == (begin, None)
    with pytest.raises(WrongService):
        End(dialler()).feed(End(listener(service="other")).sent)


def test_another_version_is_named():
    greeting = End(listener()).sent.replace(b"tfdp/2", b"tfdp/3")
    with pytest.raises(WrongService) as caught:
        End(dialler()).feed(greeting)
    assert caught.value.version == "3"


def test_no_end_asks_for_more_than_its_next_message():
    listens, dials = End(listener()), End(dialler())
    assert listens.wanted == 32 + len(CLAIM) + 32
    assert dials.wanted == GREETING_BYTES
    dials.feed(listens.sent)
    assert dials.wanted == 32


def test_the_end_of_a_connection_ends_a_handshake():
    for steps in (listener(), dialler()):
        with pytest.raises(ConnectionFailed, match="it closed the connection"):
            End(steps).steps.send(b"")
