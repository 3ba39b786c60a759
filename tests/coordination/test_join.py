"""What a worker says where it cannot join its cluster."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import tensorflow as tf

from tfdp.communication.cluster import Cluster
from tfdp.communication.coordination import join
from tfdp.communication.coordination.join import Worker, joining


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "join_deadline", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(join, "_ENDING_SECONDS", 0.2)


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    """Something that listens on the port of the first worker."""
    with socket.create_server(("localhost", 0)) as server:
        yield server


def address(server: socket.socket) -> str:
    return f"localhost:{server.getsockname()[1]}"


def second_worker(first: str) -> Worker:
    return Worker(Cluster((first, "localhost:1"), task_index=1), None, None, 4.0)


def test_a_stranger_on_the_port_of_the_first_worker_is_named(stranger: socket.socket):
    first = address(stranger)
    with (
        pytest.raises(
            TimeoutError, match=r"Waited 4 s to join.*another program"
        ) as told,
        joining(second_worker(first)),
    ):
        raise tf.errors.DeadlineExceededError(None, None, "Deadline Exceeded")
    assert f"worker 0 ({first})" in str(told.value)
    assert "\n" not in str(told.value)


def test_a_worker_that_stops_while_all_join_is_named():
    with (
        pytest.raises(TimeoutError, match=r"^worker 0 \(.*\) exited.*Socket closed"),
        joining(second_worker("localhost:2")),
    ):
        raise tf.errors.UnavailableError(None, None, "Socket closed\nand more")


def test_a_worker_that_stops_and_still_answers_gets_one_sentence(
    stranger: socket.socket,
):
    with (
        pytest.raises(TimeoutError, match=r"^One of the workers exited while") as told,
        joining(second_worker(address(stranger))),
    ):
        raise tf.errors.UnavailableError(None, None, "Socket closed\nand more")
    assert "\n" not in str(told.value)


def test_an_error_of_another_kind_stays_as_it_is(stranger: socket.socket):
    with (
        pytest.raises(RuntimeError, match=r"^of another kind$"),
        joining(second_worker(address(stranger))),
    ):
        raise RuntimeError("of another kind")
