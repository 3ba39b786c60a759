"""Lines of the rendezvous: limited, and sealed against who stands between."""

from __future__ import annotations

import pytest

from tfdp.launch.rendezvous.channel import MAX_LINE_BYTES, Seal, decode, encode
from tfdp.launch.rendezvous.failure import MalformedMessage

MESSAGE = {"type": "start", "nodes": [["10.0.0.1", [1, 2]]], "text": "ü"}


def test_a_message_comes_back_as_it_was():
    assert decode(encode(MESSAGE)) == MESSAGE


NO_MESSAGES = (
    *(b"", b"\n", b"GET / HTTP/1.1\r\n", b"[1]\n", b"1\n", b'"x"\n', b"\xff\n"),
    *(b"[" * 100_000, b'{"a":' * 50_000),
)


@pytest.mark.parametrize("line", NO_MESSAGES, ids=lambda line: repr(line[:8]))
def test_what_is_no_object_of_json_is_malformed(line):
    with pytest.raises(MalformedMessage):
        decode(line)


def test_a_message_that_would_be_too_long_is_not_written():
    with pytest.raises(ValueError, match="too long"):
        encode({"text": "x" * MAX_LINE_BYTES})


def test_an_altered_repeated_or_reordered_line_breaks_the_seal():
    sender = Seal(b"key")
    lines = [sender.seal({"type": name}) for name in ("one", "two")]
    for wrong in (
        lines[0].replace(b"one", b"two"),
        lines[1],
        lines[0].partition(b" ")[2],
        b"\n",
        "ü \n".encode(),
    ):
        with pytest.raises(MalformedMessage):
            Seal(b"key").unseal(wrong)
    receiver = Seal(b"key")
    receiver.unseal(lines[0])
    with pytest.raises(MalformedMessage):
        receiver.unseal(lines[0])
    with pytest.raises(MalformedMessage):
        Seal(b"another key").unseal(lines[0])
