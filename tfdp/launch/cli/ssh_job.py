"""`tfdp run --hosts`: launchers of several hosts, started by ssh from one terminal."""

from __future__ import annotations

import os
import re
import selectors
import signal
import time
from collections.abc import Sequence
from typing import Any

import tfdp
from tfdp.launch.cli import remote_line
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.json_screen import Entry
from tfdp.launch.cli.screen import Level, Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.ssh import CONNECTION_LOST, describe_failure, ssh_command
from tfdp.launch.cli.ssh_worker import SshWorker
from tfdp.launch.cli.tracebacks import Tracebacks
from tfdp.launch.rendezvous.failure import NODE_LOST

_TURN_SECONDS = 0.1
# For a host to answer: its Python has to be read from a disk that may be far away.
_ANSWER_SECONDS = 60.0
# The launchers tell each other why they end; who has not heard it is told from here.
_HEARSAY_SECONDS = 3.0
# After the grace of the workers: for the ends of launchers and connections.
_END_SECONDS = 10.0
# Two launchers that say the same within so long say it once.
_ECHO_SECONDS = 8.0
# Between two attempts to bring a host back.
_RETURN_SECONDS = 2.0
_LOST_CODES = (CONNECTION_LOST, -signal.SIGTERM, -signal.SIGKILL)
_OF_WORKER = re.compile(r"\[worker (\d+)\] ?(.*)")
_OURS = "tfdp: "
# How the launchers say why all end.
_REASON = re.compile(r"\bwere stopped\b")


class SshJob:
    """Launchers of all hosts, until their job is over.

    To be used as a context manager, which ends all connections, however it is left.

    Args:
        hosts: Sequence of `Host`.
        orders: Sequence of bytes, the line that tells each what to run.
        python: String, path of the Python of all hosts.
        screen: The `Screen` that shows the output.
        signals: The `SignalPipe`.
        grace_seconds: Float, of the workers.
        starts_again: Bool, whether a host whose connection was lost is started again,
            to join at the next start of all.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        orders: Sequence[bytes],
        python: str,
        screen: Screen,
        signals: SignalPipe,
        grace_seconds: float,
        starts_again: bool,
    ) -> None:
        self._hosts, self._orders = hosts, orders
        self._python, self._folder = python, os.getcwd()
        self._screen, self._signals = screen, signals
        self._grace_seconds = grace_seconds
        self._starts_again = starts_again
        # Hosts that are to come back, by their place, and when they are tried.
        self._returns: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._workers: list[SshWorker] = []
        self._tracebacks = Tracebacks()
        self._ranks: set[int] = set()
        # When something was said, and by which launchers.
        self._said: dict[str, tuple[float, set[str]]] = {}
        # Of a connection that was lost: said if no launcher has a better word for it.
        self._lost_text = ""
        self._has_reason = False
        self._num_signals = 0
        self._code: int | None = None
        # When the others are told to end, and when nobody is waited for any more.
        self._dismiss_at = self._end_at = float("inf")
        self._beat_at = 0.0

    def __enter__(self) -> SshJob:
        self._selector.register(self._signals, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.close()
        self._selector.close()

    def run(self) -> int:
        """Start all launchers and wait for their ends.

        Returns:
            Int, the exit code: that of the launcher that ended first of those that
            have failed, 69 if its connection was lost, or 0.
        """
        self._workers = [self._start(host) for host in self._hosts]
        started_at = time.monotonic()
        try:
            self._wait(started_at)
        finally:
            self._show_rest()
        return self._code or 0

    def _start(self, host: Host) -> SshWorker:
        worker = SshWorker(host, ssh_command(host, self._python, self._folder))
        for stream in (worker.output, worker.words):
            self._selector.register(stream, selectors.EVENT_READ, (worker, stream))
        return worker

    def _wait(self, started_at: float) -> None:
        while any(worker.is_running for worker in self._workers):
            self._turn()
            now = time.monotonic()
            self._heed_signals(now)
            self._bring_back(now)
            if now - started_at >= _ANSWER_SECONDS:
                self._give_up_silent()
            if now >= self._dismiss_at:
                self._dismiss()
            if now >= self._end_at or self._screen.has_no_reader:
                break

    def _show_rest(self) -> None:
        """Show what was held back, and why a connection was lost."""
        for rank in self._ranks:
            self._print(rank, self._tracebacks.rest(rank))
        self._tell_lost()

    def _turn(self) -> None:
        """Wait a moment, show what was written, and note who has ended."""
        for key, _ in self._selector.select(_TURN_SECONDS):
            if key.data is None:
                self._signals.read()
                continue
            worker, stream = key.data
            lines = stream.read()
            if stream.has_ended:
                self._selector.unregister(stream)
            show = self._show if stream is worker.output else self._note_error
            for line in lines:
                show(worker, line)
        for rank in self._ranks:
            self._print(rank, self._tracebacks.due(rank))
        self._beat()
        for worker in self._workers:
            worker.flush()
            if worker.poll():
                self._note_end(worker)
        self._screen.refresh()

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + remote_line.BEAT_SECONDS
            for worker in self._workers:
                if worker.is_running:
                    worker.send(remote_line.BEAT)

    def _show(self, worker: SshWorker, line: str) -> None:
        """Show a line of a host: its workers', or its launcher's own words."""
        if worker.answer(line):
            self._begin(worker)
        elif self._screen.is_verbatim and (entry := Entry.from_line(line)):
            self._show_entry(worker, entry)
        elif found := _OF_WORKER.match(line):
            rank = int(found[1])
            self._ranks.add(rank)
            self._print(rank, self._tracebacks.take(rank, [found[2]]))
        elif worker.version is not None and not worker.is_dismissed and line.strip():
            told = line if line.startswith(_OURS) else f"{worker.host.name}: {line}"
            self._say(told, worker.host.name)

    def _show_entry(self, worker: SshWorker, entry: Entry) -> None:
        node = self._workers.index(worker)
        if entry.stream == "worker" and entry.rank is not None:
            self._screen.nodes[entry.rank] = node
            self._screen.line(entry.rank, entry.message)
        elif not worker.is_dismissed:
            level: Level = entry.level or "info"
            told = entry.message, worker.host.name, level
            self._say(*told, rank=entry.rank, node=node)

    def _note_error(self, worker: SshWorker, line: str) -> None:
        """Keep what ssh says, or what comes before the launcher has answered."""
        worker.errors.append(line)

    def _begin(self, worker: SshWorker) -> None:
        if worker.is_dismissed:
            return
        if worker.version == tfdp.__version__:
            worker.is_ordered = True
            worker.send(self._orders[self._workers.index(worker)])
            return
        worker.is_dismissed = True
        self._fail(
            2,
            f"{worker.host.target} has tfdp {worker.version}, this machine has tfdp "
            f"{tfdp.__version__}. Install the same version on all hosts",
        )

    def _print(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._screen.line(rank, line)

    def _say(
        self, text: str, launcher: str = "", level: Level = "info", **about: Any
    ) -> None:
        """Print a sentence, unless another launcher has just said the same."""
        self._has_reason = self._has_reason or bool(_REASON.search(text))
        now = time.monotonic()
        said_at, by = self._said.get(text, (float("-inf"), set()))
        if now - said_at < _ECHO_SECONDS and launcher not in by:
            by.add(launcher)
            return
        self._said[text] = (now, {launcher})
        self._screen.message(text, level, **about)

    def _note_end(self, worker: SshWorker) -> None:
        code = worker.exit_code or 0
        if not code or worker.is_dismissed:
            return
        is_lost = code in _LOST_CODES and worker.is_ordered
        if (is_lost or worker.is_return) and self._may_return(worker):
            if is_lost:
                self._say(
                    f"{_OURS}the connection to {worker.host.target} was lost; its "
                    "launcher is started again"
                )
            index = self._workers.index(worker)
            self._returns[index] = time.monotonic() + _RETURN_SECONDS
        elif worker.version is None:
            said = [line for line in worker.errors if line.strip()]
            self._fail(
                2,
                describe_failure(worker.host, code, said, self._python, self._folder),
            )
        elif is_lost:
            last = worker.errors[-1].strip() if worker.errors else "no reason given"
            self._lost_text = self._lost_text or (
                f"{_OURS}the connection to {worker.host.target} was lost ({last}); the "
                "workers of all hosts were stopped"
            )
            self._fail(NODE_LOST)
        else:
            self._fail(code)

    def _may_return(self, lost: SshWorker) -> bool:
        """Return whether somebody waits for a host that was lost."""
        others = any(w.is_running for w in self._workers if w is not lost)
        return (
            self._starts_again
            and others
            and self._code is None
            and lost is not self._workers[0]  # node 0, with which all end
        )

    def _bring_back(self, now: float) -> None:
        for index in [i for i, at in self._returns.items() if now >= at]:
            del self._returns[index]
            if self._code is None and self._may_return(self._workers[index]):
                self._give_up(self._workers[index])
                self._workers[index] = self._start(self._hosts[index])
                self._workers[index].is_return = True

    def _give_up(self, worker: SshWorker) -> None:
        """Close a connection, also one whose output is held open by somebody else."""
        for stream in (worker.output, worker.words):
            if not stream.has_ended:
                self._selector.unregister(stream)
        worker.close()

    def _fail(self, code: int, text: str = "") -> None:
        """Note the first failure; the other launchers end, or are told to."""
        if self._code is not None or self._num_signals:
            self._code = self._code or code
            return
        self._code = code
        if text:
            error = "error: " if code == 2 else ""
            self._say(f"{_OURS}{error}{text}", level="error")
        now = time.monotonic()
        self._dismiss_at = now + (_HEARSAY_SECONDS if code != 2 else 0.0)
        self._end_at = self._dismiss_at + self._grace_seconds + _END_SECONDS

    def _tell_lost(self) -> None:
        if self._lost_text and not self._has_reason and not self._num_signals:
            self._say(self._lost_text, level="error")

    def _dismiss(self) -> None:
        self._tell_lost()
        self._dismiss_at = float("inf")
        for worker in self._workers:
            worker.is_dismissed = True
            worker.stop(signal.SIGTERM)

    def _heed_signals(self, now: float) -> None:
        """Pass signals on to all launchers."""
        for signum in self._signals.received[self._num_signals :]:
            self._num_signals += 1
            self._code = self._code or 128 + signum
            self._end_at = now + self._grace_seconds + _END_SECONDS
            if signum == signal.SIGINT:
                self._tracebacks.interrupt()
            for worker in self._workers:
                worker.stop(signum)

    def _give_up_silent(self) -> None:
        for worker in self._workers:
            is_silent = worker.version is None and not worker.is_return
            if worker.is_running and is_silent:
                self._fail(
                    2,
                    f"tfdp has not started on {worker.host.target} within "
                    f"{_ANSWER_SECONDS:.0f} s",
                )
