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
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.screen import Level, OutputEntry, Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.ssh import CONNECTION_LOST, describe_failure, ssh_command
from tfdp.launch.cli.ssh_worker import SshWorker
from tfdp.launch.cli.tracebacks import Tracebacks
from tfdp.launch.rendezvous.failure import NODE_LOST

# Time limits are checked once per round of the loop, so a round waits for events at
# most this many seconds.
_POLL_SECONDS = 0.1
# A host may read Python from a slow network file system, so the launcher on a host is
# given this many seconds to print its first line. After that the job fails.
_ANSWER_SECONDS = 60.0
# After a failure the launchers notify each other, and normally end by themselves, so
# this process ends the rest only after this many seconds.
_DISMISS_SECONDS = 3.0
# A host may be lost, so the ends of launchers and connections are awaited for at most
# this many seconds after the grace period of the workers.
_END_SECONDS = 10.0
# Several launchers report the same event at about the same time, so the same message is
# shown only once within this many seconds.
_ECHO_SECONDS = 8.0
# A lost host may take a moment before ssh can reach it again, so its launcher is
# started again only after this many seconds.
_RESTART_SECONDS = 2.0
# ssh exits with these codes if it has lost the connection, or was killed itself, so the
# launcher's own exit code is unknown.
_LOST_CODES = (CONNECTION_LOST, -signal.SIGTERM, -signal.SIGKILL)
_WORKER_LINE = re.compile(r"\[worker (\d+)\] ?(.*)")
_PREFIX = "tfdp: "
# A message of a launcher that matches says why all nodes stop, so a lost connection is
# not reported in addition.
_REASON = re.compile(r"\bwere stopped\b")


class SshJob:
    """Job that runs the launchers of all hosts by ssh.

    Args:
        hosts: Sequence of `Host`; the first one is node 0.
        orders: Sequence of bytes, the line from `make_orders` for each launcher.
        settings: `RunSettings`. In a job with restarts, the launcher of a host whose
            connection was lost is also restarted, and joins the next attempt.
        python: String, path of Python on all hosts.
        screen: `Screen` that shows the output.
        signals: `SignalPipe` of this process.
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
        # Lost hosts may come back only after a pause, so their launchers are restarted
        # at these times, by rank of the node.
        self._restarts_at: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._workers: list[SshWorker] = []
        self._tracebacks = Tracebacks()
        self._ranks: set[int] = set()
        # Launchers often send the same message, which is printed only once, so the time
        # of each printed message and the nodes that have sent it are kept.
        self._said: dict[str, tuple[float, set[int | None]]] = {}
        # A launcher may still report why a connection was lost, so this message about
        # the loss is printed only if none does.
        self._lost_text = ""
        self._has_reason = False
        self._num_signals = 0
        self._code: int | None = None
        # After a failure, the remaining launchers are ended at `_dismiss_at`, and no
        # longer awaited after `_end_at`, since their hosts may be lost.
        self._dismiss_at = self._end_at = float("inf")
        self._beat_at = 0.0

    def close(self) -> None:
        """End the ssh connections to all hosts, and with them the launchers there."""
        for worker in self._workers:
            worker.close()
        self._selector.close()

    def run(self) -> int:
        """Start all launchers and wait for their exits.

        Returns:
            Int, the exit code: that of the first launcher that failed, 2 if it could
            not be started, 69 if its connection was lost, 128 plus the number of a
            received signal, or 0.
        """
        self._workers = [self._start(node) for node in range(len(self._hosts))]
        try:
            self._wait()
        finally:
            # Tracebacks that are still held back, and the reason of a lost connection,
            # must be printed before this process exits.
            for rank in self._ranks:
                self._print(rank, self._tracebacks.rest(rank))
            self._report_lost()
        return self._code or 0

    def _start(self, node: int) -> SshWorker:
        """Start the launcher of a node, by its rank, and watch its output."""
        host = self._hosts[node]
        worker = SshWorker(node, host, ssh_command(host, self._python, self._folder))
        for stream in (worker.output, worker.error_output):
            self._selector.register(stream, selectors.EVENT_READ, (worker, stream))
        return worker

    def _wait(self) -> None:
        """Run the loop until all launchers have exited.

        It ends early if the reader of the output has exited, or if launchers still run
        at the deadline that a failure or a signal has set.
        """
        silent_at = time.monotonic() + _ANSWER_SECONDS
        while any(worker.is_running for worker in self._workers):
            self._poll()
            self._forward_signals()
            self._restart_lost()
            now = time.monotonic()
            if now >= silent_at:
                self._fail_if_silent()
            if now >= self._dismiss_at:
                self._dismiss()
            if now >= self._end_at or self._screen.has_no_reader:
                break

    def _poll(self) -> None:
        """Wait for events, show new output, and register launchers that have ended."""
        for key, _ in self._selector.select(_POLL_SECONDS):
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
            else:  # stderr of ssh, or of a host whose launcher has not answered yet
                worker.errors += lines
        for rank in self._ranks:
            self._print(rank, self._tracebacks.due(rank))
        self._beat()
        for worker in self._workers:
            worker.flush()
            if worker.poll():
                self._handle_end(worker)
        self._screen.refresh()

    def _beat(self) -> None:
        """Send a heartbeat to all launchers if `BEAT_SECONDS` have passed."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + remote_line.BEAT_SECONDS
            for worker in self._workers:
                if worker.is_running:
                    worker.send(remote_line.BEAT)

    def _show(self, worker: SshWorker, line: str) -> None:
        """Handle a line of a host: tfdp's version, a worker's line, or a message.

        The version is answered with the launcher's order; other lines are printed.
        """
        if worker.answer(line):
            self._send_order(worker)
        elif self._screen.is_verbatim and (entry := OutputEntry.from_line(line)):
            if entry.stream == "worker" and entry.rank is not None:
                self._screen.nodes[entry.rank] = worker.node
                self._screen.line(entry.rank, entry.message)
            elif not worker.is_dismissed:
                self._print_message(
                    worker, entry.message, entry.level or "info", entry.rank
                )
        elif match := _WORKER_LINE.match(line):
            rank = int(match[1])
            self._ranks.add(rank)
            self._print(rank, self._tracebacks.take(rank, [match[2]]))
        elif worker.version is not None and not worker.is_dismissed and line.strip():
            text = line if line.startswith(_PREFIX) else f"{worker.host.name}: {line}"
            self._print_message(worker, text)

    def _send_order(self, worker: SshWorker) -> None:
        """Send a launcher its order; fail the job if it has another version of tfdp.

        A launcher that has been dismissed receives no order.
        """
        if worker.is_dismissed:
            return
        if worker.version == tfdp.__version__:
            worker.is_order_sent = True
            worker.send(self._orders[worker.node])
            return
        worker.is_dismissed = True
        self._fail(
            2,
            f"{worker.host.target} has tfdp {worker.version}, this machine has tfdp "
            f"{tfdp.__version__}. Install the same version on all hosts",
        )

    def _print(self, rank: int, lines: list[str]) -> None:
        """Print lines of the worker of a rank."""
        for line in lines:
            self._screen.line(rank, line)

    def _print_message(
        self,
        worker: SshWorker | None,
        text: str,
        level: Level = "info",
        rank: int | None = None,
    ) -> None:
        """Print a message, unless another launcher has just sent the same.

        Args:
            worker: `SshWorker` of the launcher that has sent it, or `None` for this
                process.
            text: String, the message.
            level: Severity of the message. Defaults to `"info"`.
            rank: Int, rank of the worker that the message is about, or `None`. Defaults
                to `None`.
        """
        self._has_reason = self._has_reason or bool(_REASON.search(text))
        node = None if worker is None else worker.node
        now = time.monotonic()
        said_at, by = self._said.get(text, (float("-inf"), set()))
        if now - said_at < _ECHO_SECONDS and node not in by:
            by.add(node)
            return
        self._said[text] = (now, {node})
        self._screen.message(text, level, rank=rank, node=node)

    def _handle_end(self, worker: SshWorker) -> None:
        """Handle the end of a launcher: schedule its restart, or fail the job.

        The end of a launcher with exit code 0, or of a dismissed one, has no effect.
        """
        code = worker.exit_code or 0
        if not code or worker.is_dismissed:
            return
        is_lost = code in _LOST_CODES and worker.is_order_sent
        if (is_lost or worker.is_restarted) and self._may_restart(worker):
            if is_lost:
                self._print_message(
                    None,
                    f"{_PREFIX}the connection to {worker.host.target} was lost; its "
                    "launcher is started again",
                )
            self._restarts_at[worker.node] = time.monotonic() + _RESTART_SECONDS
        elif worker.version is None:
            said = [line for line in worker.errors if line.strip()]
            why = describe_failure(worker.host, code, said, self._python, self._folder)
            self._fail(2, why)
        elif is_lost:
            last = worker.errors[-1].strip() if worker.errors else "no reason given"
            self._lost_text = self._lost_text or (
                f"{_PREFIX}the connection to {worker.host.target} was lost ({last}); "
                "the workers of all hosts were stopped"
            )
            self._fail(NODE_LOST)
        else:
            self._fail(code)

    def _may_restart(self, lost: SshWorker) -> bool:
        """Return whether a lost host's launcher may join the job again.

        It may in a job with restarts that has not failed, while other launchers run.
        Node 0 may not: its loss ends the job for all.
        """
        others = any(w.is_running for w in self._workers if w is not lost)
        starts_again = self._settings.max_restarts > 0 and self._code is None
        return starts_again and others and lost.node > 0

    def _restart_lost(self) -> None:
        """Restart the launchers of lost hosts whose restart is due."""
        now = time.monotonic()
        for node in [n for n, at in self._restarts_at.items() if now >= at]:
            del self._restarts_at[node]
            if self._may_restart(self._workers[node]):
                self._give_up(self._workers[node])
                self._workers[node] = self._start(node)
                self._workers[node].is_restarted = True

    def _give_up(self, worker: SshWorker) -> None:
        """Stop watching a host's output, and close the connection to the host."""
        for stream in (worker.output, worker.error_output):
            if not stream.has_ended:
                self._selector.unregister(stream)
        worker.close()

    def _fail(self, code: int, text: str = "") -> None:
        """Record and print the first failure; schedule the end of the other launchers.

        After a signal, only the code is recorded.

        Args:
            code: Int, exit code; 2 if a launcher could not be started.
            text: String, the error, or `""` if a launcher has reported it. Defaults to
                `""`.
        """
        if self._code is not None or self._num_signals:
            self._code = self._code or code
            return
        self._code = code
        if text:
            error = "error: " if code == 2 else ""
            self._print_message(None, f"{_PREFIX}{error}{text}", "error")
        now = time.monotonic()
        self._dismiss_at = now + (_DISMISS_SECONDS if code != 2 else 0.0)
        self._end_at = self._dismiss_at + self._settings.grace + _END_SECONDS

    def _report_lost(self) -> None:
        """Print that a connection was lost, if nothing else explains the job's end.

        A reason that a launcher has reported explains it, and so does a signal.
        """
        if self._lost_text and not self._has_reason and not self._num_signals:
            self._print_message(None, self._lost_text, "error")

    def _dismiss(self) -> None:
        """Ask all launchers to end after a failure, and ignore their later messages."""
        self._report_lost()
        self._dismiss_at = float("inf")
        for worker in self._workers:
            worker.is_dismissed = True
            worker.stop(signal.SIGTERM)

    def _forward_signals(self) -> None:
        """Forward received signals to all launchers; limit the wait for their ends.

        After the grace period and `_END_SECONDS` more, the launchers are no longer
        awaited.
        """
        for signum in self._signals.received[self._num_signals :]:
            self._num_signals += 1
            self._code = self._code or 128 + signum
            self._end_at = time.monotonic() + self._settings.grace + _END_SECONDS
            if signum == signal.SIGINT:
                self._tracebacks.interrupt()
            for worker in self._workers:
                worker.stop(signum)

    def _fail_if_silent(self) -> None:
        """Fail the job if a launcher has not sent its version yet.

        Call this `_ANSWER_SECONDS` after the start; restarted launchers are exempt.
        """
        for worker in self._workers:
            if worker.is_running and worker.version is None and not worker.is_restarted:
                host, seconds = worker.host.target, f"{_ANSWER_SECONDS:.0f} s"
                self._fail(2, f"tfdp has not started on {host} within {seconds}")
