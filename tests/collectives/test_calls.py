"""Calls of functions with collectives in several threads."""

from __future__ import annotations

import concurrent.futures
import threading
import types

import pytest

from tfdp.communication.collectives import calls
from tfdp.communication.coordination.flight_record import CollectiveRing
from tfdp.communication.coordination.flight_steps import (
    TracedCollective,
    TracedCollectives,
)
from tfdp.communication.coordination.progress import progress


class Handle:
    """Stands for the handle of a resource of collectives."""

    def __init__(self, device: str) -> None:
        self.device = device
        calls.mark(self)


@pytest.fixture
def call():
    """Calls a function in a thread of its own; returns the future."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:

        def enter(function: object, *inputs: object) -> str:
            with calls.one_at_a_time(function, inputs):
                return "called"

        yield lambda *args: thread.submit(enter, *args)


@pytest.mark.parametrize("device", ["CPU:0", "GPU:0"])
def test_a_function_waits_for_its_own_call_and_on_gpus_for_that_of_another(
    call, device: str
):
    handle, first, second = Handle(device), new_function(), new_function()
    with calls.one_at_a_time(first, [handle]):
        assert call(new_function(), "no handle").result(5.0) == "called"
        other = call(second, handle)
        if device == "CPU:0":
            assert other.result(5.0) == "called"
            other = call(first, handle)
        with pytest.raises(concurrent.futures.TimeoutError):
            other.result(0.1)
    assert other.result(5.0) == "called"


def test_on_several_workers_two_functions_are_refused(call, monkeypatch):
    group = types.SimpleNamespace(num_workers=2)
    monkeypatch.setattr(calls, "latest_group", lambda: group)
    handle = Handle("CPU:0")
    with (
        calls.one_at_a_time(new_function(), [handle]),
        pytest.raises(RuntimeError, match="Two threads of a worker train at the same"),
    ):
        call(new_function(), handle).result(5.0)


def test_calls_with_collectives_of_tensorflow_are_numbered_outside_of_loops(
    monkeypatch,
):
    group, handle = types.SimpleNamespace(num_workers=2), Handle("GPU:0")
    ring, traced = CollectiveRing(), TracedCollectives()
    monkeypatch.setattr(calls, "latest_group", lambda: group)
    monkeypatch.setattr(calls, "tensorflow_calls", ring)
    monkeypatch.setattr(calls, "traced_collectives", traced)
    function, local = new_function(), new_function()
    traced.add("", function.graph, TracedCollective("all_reduce 'a'", "a of int32", 8))
    numbers = []
    for called in (function, local, function):
        with calls.one_at_a_time(called, [handle]):
            numbers.append(ring.awaited())
    with progress.looping("fit"), calls.one_at_a_time(function, [handle]):
        numbers.append(ring.awaited())
    (first, number), of_local, (second, next_number), in_loop = numbers
    assert (of_local, in_loop) == (None, None)
    assert next_number == number + 1
    assert first == second
    assert (first.ranks, first.key) == ((0, 1), "a of int32")


def new_function() -> types.SimpleNamespace:
    """Stands for a traced function and its graph."""
    return types.SimpleNamespace(graph=threading.Lock())
