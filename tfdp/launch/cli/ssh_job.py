"""`tfdp run --hosts`: launchers of several hosts, started by ssh from one terminal."""

from __future__ import annotations

import os
import re
import selectors
import signal
import time
from collections.abc import Sequence

import tfdp
from tfdp.launch.cli import remote_line
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.json_screen import Entry
from tfdp.launch.cli.launch import RunSettings
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

    Args:
        hosts: Sequence of `Host`.
        orders: Sequence of bytes, the line that tells each what to run.
        settings: `RunSettings`. Where jobs start again, a host whose connection was
            lost is started again, too, to join at the next start of all.
        python: String, path of the Python of all hosts.
        screen: The `Screen` that shows the output.
        signals: The `SignalPipe`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        orders: Sequence[bytes],
        settings: RunSettings,
        python: str,
        screen: Screen,
        signals: SignalPipe,
    ) -> None:
        self._hosts, self._orders = hosts, orders
        self._python, self._folder = python, os.getcwd()
        self._screen, self._signals = screen, signals
        self._settings = settings
        # Nodes whose hosts are to come back, and when they are tried.
        self._returns: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._workers: list[SshWorker] = []
        self._tracebacks = Tracebacks()
        self._ranks: set[int] = set()
        # When something was said, and by which launchers.
        self._said: dict[str, tuple[float, set[int | None]]] = {}
        # Of a connection that was lost: said if no launcher has a better word for it.
        self._lost_text = ""
        self._has_reason = False
        self._num_signals = 0
        self._code: int | None = None
        # When the others are told to end, and when nobody is waited for any more.
        self._dismiss_at = self._end_at = float("inf")
        self._beat_at = 0.0

    def close(self) -> None:
        """End all connections."""
        for worker in self._workers:
            worker.close()
        self._selector.close()

    def run(self) -> int:
        """Start all launchers and wait for their ends.

        Returns:
            Int, the exit code: that of the launcher that ended first of those that
            have failed, 69 if its connection was lost, or 0.
        """
        self._workers = [self._start(node) for node in range(len(self._hosts))]
        try:
            self._wait(time.monotonic())
        finally:
            # What was held back, and why a connection was lost.
            for rank in self._ranks:
                self._print(rank, self._tracebacks.rest(rank))
            self._tell_lost()
        return self._code or 0

    def _start(self, node: int) -> SshWorker:
        host = self._hosts[node]
        worker = SshWorker(node, host, ssh_command(host, self._python, self._folder))
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

    def _turn(self) -> None:
        """Wait a moment, show what was written, and note who has ended."""
        for key, _ in self._selector.select(_TURN_SECONDS):
            if key.data is None:
                self._signals.read()
                continue
            worker, stream = key.data
            lines = stream.read()
            if stream.has_ended:
                lines += stream.close()
                self._selector.unregister(stream)
            if stream is worker.output:
                for line in lines:
                    self._show(worker, line)
            else:  # what ssh says, or what comes before the launcher has answered
                worker.errors += lines
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
            if entry.stream == "worker" and entry.rank is not None:
                self._screen.nodes[entry.rank] = worker.node
                self._screen.line(entry.rank, entry.message)
            elif not worker.is_dismissed:
                self._say(worker, entry.message, entry.level or "info", entry.rank)
        elif found := _OF_WORKER.match(line):
            rank = int(found[1])
            self._ranks.add(rank)
            self._print(rank, self._tracebacks.take(rank, [found[2]]))
        elif worker.version is not None and not worker.is_dismissed and line.strip():
            told = line if line.startswith(_OURS) else f"{worker.host.name}: {line}"
            self._say(worker, told)

    def _begin(self, worker: SshWorker) -> None:
        if worker.is_dismissed:
            return
        if worker.version == tfdp.__version__:
            worker.is_ordered = True
            worker.send(self._orders[worker.node])
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
        self,
        worker: SshWorker | None,
        text: str,
        level: Level = "info",
        rank: int | None = None,
    ) -> None:
        """Print a sentence, unless another launcher has just said the same."""
        self._has_reason = self._has_reason or bool(_REASON.search(text))
        node = None if worker is None else worker.node
        now = time.monotonic()
        said_at, by = self._said.get(text, (float("-inf"), set()))
        if now - said_at < _ECHO_SECONDS and node not in by:
            by.add(node)
            return
        self._said[text] = (now, {node})
        self._screen.message(text, level, rank=rank, node=node)

    def _note_end(self, worker: SshWorker) -> None:
        code = worker.exit_code or 0
        if not code or worker.is_dismissed:
            return
        is_lost = code in _LOST_CODES and worker.is_ordered
        if (is_lost or worker.is_return) and self._may_return(worker):
            if is_lost:
                self._say(
                    None,
                    f"{_OURS}the connection to {worker.host.target} was lost; its "
                    "launcher is started again",
                )
            self._returns[worker.node] = time.monotonic() + _RETURN_SECONDS
        elif worker.version is None:
            said = [line for line in worker.errors if line.strip()]
            why = describe_failure(worker.host, code, said, self._python, self._folder)
            self._fail(2, why)
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
        starts_again = self._settings.max_restarts > 0 and self._code is None
        return starts_again and others and lost.node > 0  # with node 0 all end

    def _bring_back(self, now: float) -> None:
        for node in [n for n, at in self._returns.items() if now >= at]:
            del self._returns[node]
            if self._may_return(self._workers[node]):
                self._give_up(self._workers[node])
                self._workers[node] = self._start(node)
                self._workers[node].is_return = True

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
            self._say(None, f"{_OURS}{error}{text}", "error")
        now = time.monotonic()
        self._dismiss_at = now + (_HEARSAY_SECONDS if code != 2 else 0.0)
        self._end_at = self._dismiss_at + self._settings.grace + _END_SECONDS

    def _tell_lost(self) -> None:
        if self._lost_text and not self._has_reason and not self._num_signals:
            self._say(None, self._lost_text, "error")

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
            self._end_at = now + self._settings.grace + _END_SECONDS
            if signum == signal.SIGINT:
                self._tracebacks.interrupt()
            for worker in self._workers:
                worker.stop(signum)

    def _give_up_silent(self) -> None:
        for worker in self._workers:
            if worker.is_running and worker.version is None and not worker.is_return:
                host, seconds = worker.host.target, f"{_ANSWER_SECONDS:.0f} s"
                self._fail(2, f"tfdp has not started on {host} within {seconds}")
