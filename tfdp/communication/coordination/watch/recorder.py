"""Recorder: write this worker's flight record at trouble, and on a signal."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tfdp.communication.cluster import process_tree
from tfdp.communication.coordination.flight_record import (
    LAUNCHER_SIGNAL,
    RECORD_SIGNAL,
    FlightRecord,
    ThreadStack,
    collective_ring,
    file_name,
    record_folder,
    tensorflow_calls,
)
from tfdp.communication.coordination.flight_steps import (
    recorded_steps,
    traced_collectives,
)
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.watch.failure_detector import FailureDetector
from tfdp.communication.coordination.watch.heartbeat import Heartbeat
from tfdp.ground import forks, user_code
from tfdp.ground._compat import runtime
from tfdp.ground.base.files import make_private_folder, replaced
from tfdp.ground.text import say

# The error that names a lost worker waits at most this long for the file of the flight
# record, which a slow disk may delay.
_WRITE_SECONDS = 2.0
# Requests for a record within this many seconds count as one, since one signal to
# several workers causes several requests.
_SAME_REQUEST_SECONDS = 1.0
# A stack in a record has at most this many frames, the innermost ones, since a deep
# recursion would make the file large.
_MAX_FRAMES = 60
_READ_BYTES = 1 << 16

# Stack of a thread, as `runtime.thread_stacks` returns it: file, line and function of
# each frame, the innermost first.
_Stack = list[tuple[str, int, str]]


class FlightRecorder:
    """Writer of this worker's flight record into the folder of logs.

    A thread writes the file, since a file system that hangs must not delay the error of
    a lost worker. The record of a failure is the last one: it has the stacks of the
    threads before they ended.

    Args:
        heartbeat: `Heartbeat` of this worker.
        detector: `FailureDetector`, with the progress of the other workers.

    Attributes:
        folder: `Path` of the folder.
    """

    def __init__(self, heartbeat: Heartbeat, detector: FailureDetector) -> None:
        self.folder = record_folder()
        self._heartbeat, self._detector = heartbeat, detector
        self._started_at = time.time()
        self._requested_at = self._signaled_at = float("-inf")
        self._is_final = False
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def record_failure(self, cause: str, lost: int) -> None:
        """Write the record of a failure; later calls have no effect.

        Args:
            cause: String, a clause.
            lost: Int, rank of the worker that was lost, or of this worker.
        """
        with self._lock:
            if not self._is_final:
                self._is_final = True
                self._write(cause, lost)

    def record_request(self, reason: str, *, is_own: bool = False) -> None:
        """Write the record that a signal to this or another worker has requested.

        Of requests within one second, only the first one writes a record, and the first
        one with `is_own`, whose record replaces the other. After `record_failure`, no
        request does.

        Args:
            reason: String, a clause.
            is_own: Bool, whether this worker received the signal, rather than another
                one. Defaults to `False`.
        """
        with self._lock:
            now = time.monotonic()
            last = self._signaled_at if is_own else self._requested_at
            if now - last > _SAME_REQUEST_SECONDS and not self._is_final:
                self._requested_at = now
                self._signaled_at = now if is_own else self._signaled_at
                self._write(reason, None)

    def wait(self) -> None:
        """Wait until the last record is written, but at most two seconds."""
        if self._writer is not None:
            self._writer.join(_WRITE_SECONDS)

    @property
    def command(self) -> str:
        """String, the command that shows records; `""` unless a failure is recorded."""
        self.wait()
        is_written = self._is_final and self._error is None
        return f"tfdp doctor {shlex.quote(str(self.folder))}" if is_written else ""

    def _record(
        self, reason: str, lost: int | None
    ) -> tuple[FlightRecord, dict[int, _Stack]]:
        """Create the record of this moment without reading files.

        Args:
            reason: String, why the record is written, a clause.
            lost: Int or `None`, as in `FlightRecord`.

        Returns:
            Tuple of the `FlightRecord` without stacks, and a dict from the identifier
            of a thread to its stack.
        """
        stacks = runtime.thread_stacks(_MAX_FRAMES)
        own = self._heartbeat.progress
        num_workers = len(self._detector.ranks()) + 1
        steps = recorded_steps(
            progress.steps(), num_workers, bool(own.source), traced_collectives
        )
        entered = collective_ring.collectives() + tensorflow_calls.collectives()
        record = FlightRecord(
            rank=self._heartbeat.rank,
            num_workers=num_workers,
            host=socket.gethostname(),
            process=os.getpid(),
            reason=reason,
            lost=lost,
            started_at=self._started_at,
            written_at=time.time(),
            place=own.name,
            source=own.source,
            collectives=sorted(entered + steps, key=lambda each: each.begin),
            spans=progress.spans(),
            threads=[],
            peers=self._detector.peers(),
        )
        return record, stacks

    def _write(self, reason: str, lost: int | None) -> None:
        """Write a record on a new thread; on the caller's while Python shuts down.

        Args:
            reason: String, why the record is written, a clause.
            lost: Int or `None`, as in `FlightRecord`.
        """
        try:
            taken = self._record(reason, lost)
        except Exception as error:  # noqa: BLE001 no error may hide the lost worker
            self._report(error)
            return
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        arguments = (*taken, names, self._writer)
        writer = threading.Thread(
            target=self._write_file, args=arguments, name="tfdp flight record"
        )
        writer.daemon = True
        try:
            writer.start()
        except RuntimeError:
            self._write_file(*arguments)
            return
        self._writer = writer

    def _write_file(
        self,
        record: FlightRecord,
        stacks: dict[int, _Stack],
        names: dict[int | None, str],
        before: threading.Thread | None,
    ) -> None:
        """Write the file of a record; print one sentence if that fails.

        Args:
            record: `FlightRecord`, without stacks.
            stacks: Dict from the identifier of a thread to its stack.
            names: Dict from the identifier of a thread to its name.
            before: Thread that writes the previous record, for whose end this call
                waits first; or `None`.
        """
        if before is not None:
            before.join()
        threads = [
            _describe_stack(names.get(thread, "a thread of native code"), thread, stack)
            for thread, stack in stacks.items()
        ]
        text = dataclasses.replace(record, threads=threads).to_json()
        try:
            make_private_folder(self.folder)
            with replaced(self.folder / file_name(record.rank)) as temporary:
                Path(temporary).write_text(text, "utf-8")
            self._error = None
        except OSError as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Print in one sentence that the record cannot be written.

        Print nothing if the previous record could not be written either.

        Args:
            error: Exception that the attempt to write has raised.
        """
        is_known, self._error = self._error is not None, error
        if is_known:
            return
        say(
            "the flight record of this worker cannot be written to "
            f"{self.folder}: {getattr(error, 'strerror', None) or error}"
        )


def _describe_stack(name: str, thread: int, stack: _Stack) -> ThreadStack:
    """Format the stack of a thread, and read the line of the user's code.

    Args:
        name: String, name of the thread.
        thread: Int, its identifier.
        stack: List of tuples of file, line and function, the innermost first.
    """
    is_main = thread == threading.main_thread().ident
    places = [(path, line) for path, line, _ in stack if user_code.is_user_file(path)]
    line = user_code.describe_line(*places[0]) if places else ""
    frames = [f"{path}:{line} in {function}" for path, line, function in stack]
    return ThreadStack(name, is_main, frames, line)


def listen(request: Callable[[], None]) -> None:
    """Call a function on a thread whenever this process receives a signal for records.

    The handlers are those of `faulthandler`, which write to a socket: they run while
    the main thread is in native code, as in a collective, where handlers of Python do
    not run. A signal for which the script has a handler is left to the script.

    Args:
        request: Callable without arguments.
    """
    reader, writer = map(forks.close_in_forks, socket.socketpair())
    # A default timeout that the script has set (`socket.setdefaulttimeout`) would end
    # `recv` with an error, so the modes of both sockets are set here.
    reader.setblocking(True)
    writer.setblocking(False)
    signals = {
        number
        for number in (RECORD_SIGNAL, LAUNCHER_SIGNAL)
        # `signal.getsignal` does not show handlers in C, such as those of
        # `faulthandler`, so the system's list of handled signals is also read.
        if signal.getsignal(number) is signal.SIG_DFL
        and not process_tree.has_signal_handler(os.getpid(), number)
    }
    for number in signals:
        faulthandler.register(number, writer.fileno(), all_threads=False)

    @forks.in_forks
    def restore_in_fork() -> None:
        """Remove the handlers in a forked process, where the sockets are closed."""
        for number in signals:
            faulthandler.unregister(number)

    def serve() -> None:
        """Call `request` after each write of a handler to the socket."""
        while reader.recv(_READ_BYTES):
            request()

    thread = threading.Thread(target=serve, name="tfdp flight recorder", daemon=True)

    def stop() -> None:
        """Ignore the signals from now on, and end the thread."""
        for number in signals:
            faulthandler.unregister(number)
            signal.signal(number, signal.SIG_IGN)
        # Unlike `close`, `shutdown` ends `recv` in the thread even if a forked process
        # still has the socket open.
        writer.shutdown(socket.SHUT_WR)
        thread.join()
        reader.close()
        writer.close()

    thread.start()
    forks.at_exit(stop)
