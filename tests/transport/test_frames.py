"""Messages of a head and arrays, over a link."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest

from tfdp.communication.transport.frames import receive_frame, send_frame


class Pipe:
    """What was sent, to be received."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, *buffers: bytes | memoryview) -> None:
        self.data += b"".join(buffers)

    def receive_into(self, view: bytearray | memoryview) -> None:
        view = memoryview(view)
        view[:], self.data = self.data[: len(view)], self.data[len(view) :]


ARRAYS = [
    np.arange(6, dtype="float32").reshape(2, 3),
    np.float64(1.5),
    np.zeros((0, 3), "float32"),
    np.arange(12, dtype="float64").reshape(3, 4)[:, ::2],
    np.array([1, -2, 3], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array(7),
]


def test_a_head_and_arrays_of_all_dtypes_and_shapes_arrive_as_they_were():
    pipe = Pipe()
    send_frame(pipe, {"kind": "test", "samples": 0.1}, ARRAYS)
    send_frame(pipe, {})
    head, arrays = receive_frame(pipe)
    assert head == {"kind": "test", "samples": 0.1}
    for sent, received in zip(ARRAYS, arrays, strict=True):
        np.testing.assert_array_equal(received, sent)
        assert (received.dtype, received.shape) == (sent.dtype, np.shape(sent))
    assert receive_frame(pipe) == ({}, [])
    assert pipe.data == b""


def test_nothing_is_allocated_for_a_head_of_any_length():
    pipe = Pipe()
    pipe.send(struct.pack("!I", (1 << 32) - 1))
    with pytest.raises(EOFError):
        receive_frame(pipe)
