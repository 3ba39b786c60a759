"""Calls of functions with collectives, which run one at a time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import types

import pytest

from tfdp.communication.collectives import calls


class Handle:
    """Stands for the handle of a resource of collectives."""


@pytest.fixture
def enter():
    """Enters the context of a call, in a thread of its own; returns its future."""
    handle = Handle()
    calls.mark(handle)

    def call(*inputs: object) -> str:
        function = types.SimpleNamespace()
        with calls.one_at_a_time(function, inputs or [handle]):
            return "called"

    with contextlib.ExitStack() as stack:
        stack.enter_context(calls.one_at_a_time(types.SimpleNamespace(), [handle]))
        thread = concurrent.futures.ThreadPoolExecutor(1)
        yield lambda *inputs: thread.submit(call, *inputs)
        stack.close()
        thread.shutdown()


def test_a_function_with_collectives_waits_for_that_of_another_thread(enter):
    assert enter(Handle()).result(5.0) == "called"
    waiting = enter()
    with pytest.raises(concurrent.futures.TimeoutError):
        waiting.result(0.1)


def test_on_several_workers_it_is_refused(enter, monkeypatch):
    group = types.SimpleNamespace(num_workers=2)
    monkeypatch.setattr(calls, "latest_group", lambda: group)
    with pytest.raises(RuntimeError, match="Two threads of a worker train at the same"):
        enter().result(5.0)
