"""Forked processes: nothing that this process has made acts in them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest

from tests.harness.commands import run_python
from tests.harness.forks import run_script
from tfdp.communication.coordination.clock import ProcessClock
from tfdp.communication.coordination.preemption import PreemptionNotice
from tfdp.ground import forks, user_code

DEADLINE_SECONDS = 30.0


def in_fork(function: Callable[[], object]) -> int:
    """Calls a function in a forked process, and returns that one's exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = int(bool(function()))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_what_is_registered_for_the_end_of_a_script_is_not_called_in_a_fork():
    code = """
        import os, sys, tempfile
        from tfdp.ground import forks

        class Thing: pass

        thing = Thing()
        folder = forks.TemporaryDirectory("tfdp-test-")
        forks.at_exit(lambda: print("first", flush=True))
        forks.at_exit(lambda: print("last", flush=True))
        forks.finalize(thing, print, "at exit", at_exit=True, flush=True)
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(os.path.isdir(folder.name), folder.name, flush=True)
        if os.fork() == 0:
            forks.at_exit(lambda: print("own", flush=True))
            sys.exit(0)
        os.wait()
    """
    done = run_python("-c", textwrap.dedent(code), deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.output
    there, *rest = done.output.splitlines()
    is_there, folder = there.split()
    assert is_there == "True"
    assert rest == ["own", "last", "first", "at exit"]
    assert not os.path.exists(folder)


def test_sockets_are_closed_in_a_fork_and_stay_open_here():
    server = forks.close_in_forks(socket.create_server(("127.0.0.1", 0)))
    with server:
        assert in_fork(lambda: server.fileno() >= 0) == 0
        socket.create_connection(server.getsockname()).close()


def test_a_server_of_tensorflow_refuses_connections_once_its_process_has_ended():
    # Nothing of Python's closes it: the descriptor is all that there is.
    code = """
        import os, socket, time
        from tfdp.ground import forks

        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted = server.accept()[0]
        numbers = server.detach(), accepted.detach(), client.detach()
        forks.close_port_in_forks(port)
        if os.fork() == 0:
            kept = [os.readlink(f"/dev/fd/{number}") for number in numbers]
            print(port, *kept, flush=True)
            time.sleep(600)
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        port, server, accepted, client = process.stdout.readline().split()
        assert (server, accepted) == (os.devnull, os.devnull)
        assert client.startswith("socket:")  # of another port: not the server's
        address = "127.0.0.1", int(port)
        socket.create_connection(address).close()
        process.kill()
        process.wait()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


class _Thing:
    pass


def test_what_has_threads_is_never_deleted_in_a_fork():
    thing = _Thing()
    forks.keep_in_forks(thing)
    known = weakref.ref(thing)

    def is_deleted() -> bool:
        nonlocal thing
        del thing
        gc.collect()
        return known() is None

    assert in_fork(is_deleted) == 0
    del thing
    assert known() is None


def test_a_finalizer_is_not_called_in_a_fork():
    thing, calls = _Thing(), []
    forks.finalize(thing, calls.append, 1)

    def is_called() -> bool:
        nonlocal thing
        del thing
        gc.collect()
        return bool(calls)

    assert in_fork(is_called) == 0
    del thing
    assert calls == [1]


def test_garbage_of_the_parent_is_never_deleted_in_a_fork():
    # Plain Keras crashes: to delete a function of TensorFlow's needs its threads.
    code = """
        import gc, os
        import keras
        import numpy as np
        import tfdp

        def forget():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            model.fit(np.zeros((8, 3)), np.zeros((8, 1)), verbose=0)

        gc.disable()
        for _ in range(3):
            forget()
        if os.fork() == 0:
            gc.collect()
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    done = run_script(textwrap.dedent(code), deadline_seconds=DEADLINE_SECONDS)
    assert done.output.splitlines()[-1] == "0", done.output


def test_a_call_in_a_fork_says_where_it_works():
    owner = forks.Owner()
    owner.check("`fit`")

    def says() -> bool:
        with pytest.raises(RuntimeError) as caught:
            owner.check("`fit`")
        text = str(caught.value)
        return (
            f"`fit` was called in process {os.getpid()}" in text
            and f"Call it in process {os.getppid()}" in text
        )

    assert in_fork(says) == 1


def test_a_strategy_is_refused_in_a_fork_of_a_tensorflow_process(monkeypatch):
    monkeypatch.setattr(user_code, "_started_by", [])
    user_code.check_process_of_tensorflow("A strategy")
    assert in_fork(_is_refused) == 0
    user_code._started_by.append(forks.Owner())
    user_code.check_process_of_tensorflow("A strategy")
    assert in_fork(_is_refused) == 1


def _is_refused() -> bool:
    try:
        user_code.check_process_of_tensorflow("A strategy")
    except RuntimeError as error:
        return str(error).startswith("A strategy was")
    return False


def test_a_fork_ends_by_sigterm_while_its_parent_saves_first():
    notice = PreemptionNotice()
    notice.listen()
    try:

        def is_default() -> bool:
            return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

        assert in_fork(is_default) == 1
        assert in_fork(lambda: notice.stop() or is_default()) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.is_received
        with pytest.raises(SystemExit):
            notice.exit("saved", prints=False)
    finally:
        notice.stop()


def test_a_clock_that_another_thread_reads_at_the_fork_goes_on():
    clock = ProcessClock()
    with clock._lock:
        clock.reset_in_fork()
        assert clock.now() > 0
