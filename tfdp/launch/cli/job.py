"""Local job: its workers run until all are done, or one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import click

from tfdp.communication.cluster import Cluster, process_tree
from tfdp.communication.coordination.preemption import PREEMPTED, SAVE_SIGNAL
from tfdp.launch.cli.launch import worker_environment
from tfdp.launch.cli.noise import is_noise, is_of_peers
from tfdp.launch.cli.other_nodes import OtherNodes
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import SignalPipe
from tfdp.launch.cli.start import Starter
from tfdp.launch.cli.tracebacks import Tracebacks
from tfdp.launch.cli.worker import TAIL_LINES, LogFile, Worker, shell_code, signal_name
from tfdp.launch.rendezvous.failure import LOST_EXIT_SECONDS

TIMED_OUT = 124
_TURN_SECONDS = 0.1
_BEHIND_SECONDS = 0.01
# Workers that are not in `fit` do not hear that they are asked to save.
_ASK_AGAIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class JobContext:
    """What all attempts to run a job share.

    Args:
        starter: `Starter` of what every worker runs.
        screen: The `Screen` that shows the output.
        signals: The `SignalPipe`, which outlives each attempt: a signal that comes at
            the end of one counts.
        grace_seconds: Float, between asking the workers to stop and killing
            them. Defaults to `5.0`.
        until: Float, by `time.monotonic()`, when all is stopped, or `None` for no
            limit. Defaults to `None`.
    """

    starter: Starter
    screen: Screen
    signals: SignalPipe
    grace_seconds: float = 5.0
    until: float | None = None


class Job:
    """One attempt: the worker processes of a job on this machine.

    It leaves no process behind, however it ends.

    Args:
        context: `JobContext`.
        clusters: Sequence of `Cluster`, one for each worker of this machine, in the
            order of ranks, which follow one another.
        logs: Sequence of `LogFile`, one for each slot of this machine.
        slots: Sequence of ints, the slot of each worker, or `None` for one for each.
            Defaults to `None`.
        others: `OtherNodes`, which say what has failed where, or `None` if all workers
            are on this machine. Defaults to `None`.
        save_after_seconds: Float, after which workers are asked to save their
            training and to end, or `None` for never. Those whose script does not
            save when it is asked continue undisturbed. Defaults to `None`.

    Attributes:
        failed: The `Worker` that failed first, or the lost one that it names, or
            `None`.
    """

    def __init__(
        self,
        context: JobContext,
        clusters: Sequence[Cluster],
        logs: Sequence[LogFile],
        *,
        slots: Sequence[int] | None = None,
        others: OtherNodes | None = None,
        save_after_seconds: float | None = None,
    ) -> None:
        self._context, self._clusters, self._logs = context, clusters, logs
        self._starter = context.starter
        self._screen, self._signals = context.screen, context.signals
        self._others, self._save_after_seconds = others, save_after_seconds
        self._first_rank = min(cluster.rank for cluster in clusters)
        self._slots = slots or range(len(clusters))
        self._workers: list[Worker] = []
        self.failed: Worker | None = None
        self._code = 0
        self._is_stopping = self._is_interrupted = False
        self._asked_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._tracebacks = Tracebacks()
        # Of all workers; and where among them the last one of each stands.
        self._num_lines = 0
        self._last_line: dict[int, int] = {}

    def __enter__(self) -> Job:
        self._selector.register(self._signals, selectors.EVENT_READ)
        if self._others is not None:
            self._selector.register(self._others, selectors.EVENT_READ)
        process_tree.adopt_orphans()
        self._guard = subprocess.Popen(
            [sys.executable, process_tree.__file__, self._starter.job],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # The guard, and what was there when this process became the launcher.
        self._strangers = process_tree.children()
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        for worker in self._workers:
            worker.close()
        self._guard.kill()
        self._guard.communicate()
        self._selector.close()
        self._signals.read()

    @property
    def lost(self) -> Worker | None:
        """The worker that those who failed have named as lost, or `None`.

        Who stands still does not end, and of two that end at about the same time
        either may be seen first.
        """
        found, seen = self.failed, []
        while found is not None and found not in seen:
            seen.append(found)
            index = (found.lost_rank or 0) - self._first_rank
            if found.lost_rank is None or not 0 <= index < len(self._workers):
                break
            found = self._workers[index]
        return found if found is not self.failed else None

    @property
    def has_saved(self) -> bool:
        """Bool, true if the workers have saved and ended because they were asked to."""
        failed = self.failed
        is_saved = failed is not None and failed.exit_code == PREEMPTED
        return is_saved and self._asked_at is not None and self.lost is None

    @property
    def is_preempted(self) -> bool:
        """Bool, true if a worker has saved and ended because of a signal."""
        return any(worker.exit_code == PREEMPTED for worker in self._workers)

    def run(self) -> int:
        """Start the workers and waits for their end.

        Returns:
            Int, the exit code: `0`; that of the first worker that failed, or of the
            lost one that it names, if that one fails as well; 124 after the timeout;
            75 if workers have saved their training because of a signal; 141 if the
            reader of the output has gone; or else 128 plus the number of the signal
            received.

        Raises:
            click.ClickException: If a worker cannot be started.
        """
        try:
            with self:
                return self._run()
        except OSError as error:
            sentence = f"A worker could not be started: {error}"
            raise click.ClickException(sentence) from error

    def _run(self) -> int:
        for index in range(len(self._clusters)):
            self._start(index)
        start = time.monotonic()
        while not self._is_over():
            self._turn()
            if self._signals.received:
                return self._end_by_signal(self._signals.received[0])
            if self.failed and (code := self._after_failure(self.failed)):
                return code
            if self._others is not None and (order := self._others.order()):
                return self._end_by_order(*order)
            if self._screen.has_no_reader:
                code = shell_code(-signal.SIGPIPE)
                why = "the output has lost its reader"
                return self._end_here(why, code, signal.SIGTERM)
            now, until = time.monotonic(), self._context.until
            if until is not None and now >= until:
                return self._end_by_timeout()
            self._ask_to_save(now - start)
        return self._code

    # What other kinds of jobs do otherwise.

    def _is_over(self) -> bool:
        return not self._running()

    def _after_failure(self, failed: Worker) -> int | None:
        """End the job, or go on where `None` is returned."""
        return self._end_by_failure(failed)

    def _environment(self, index: int) -> dict[str, str]:
        """The environment of a worker of this machine."""
        return worker_environment(
            self._clusters[index],
            self._slots[index],
            len(self._logs),
            self._starter.job,
            num_local=len(self._clusters),
        )

    def _ask_to_save(self, elapsed: float) -> None:
        """Ask when it is time, and again while nobody has done it."""
        after = self._save_after_seconds
        if after is None or elapsed < after:
            return
        if self._asked_at is None or elapsed - self._asked_at >= _ASK_AGAIN_SECONDS:
            self._asked_at = elapsed
            for worker in self._running():
                worker.send(SAVE_SIGNAL)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_running]

    def _start(self, index: int) -> None:
        """Start a worker of this machine, in place of one that has ended if any has."""
        start = functools.partial(self._starter.start, self._environment(index))
        worker = Worker(self._first_rank + index, start, self._logs[index])
        self._workers[index : index + 1] = [worker]
        self._selector.register(worker.output, selectors.EVENT_READ, data=worker)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(f"{worker.pid}\n".encode())
            self._guard.stdin.flush()

    def _turn(self) -> None:
        """Wait a moment, then show what was written and note who has ended."""
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if self._screen.is_behind and not self._is_stopping:
            # The workers go at the pace of who reads their output.
            time.sleep(_BEHIND_SECONDS)
        else:
            ready = self._selector.select(_TURN_SECONDS)
        self._signals.read()
        process_tree.reap_children(
            self._not_killed().union(w.pid for w in self._workers)
        )
        ended = [worker for worker in self._workers if worker.poll()]
        # Those who failed come first: what the others have to say next is
        # likely to be about them.
        for worker in sorted(ended, key=lambda worker: not worker.exit_code):
            self._show(worker, worker.read_rest())
            self._print(worker, self._tracebacks.rest(worker.rank))
            self._forget(worker)
            if worker.exit_code and not self.failed and not self._is_stopping:
                self.failed = worker
        for key, _ in ready:
            if key.data is not None and key.data.is_running:
                self._show(key.data, key.data.read())
                if key.data.output.has_ended:  # it goes on without
                    self._forget(key.data)
        for worker in self._running():
            self._print(worker, self._tracebacks.due(worker.rank))
            if (text := worker.snapshot()) is not None:
                self._screen.snapshot(worker.rank, text)
        self._screen.refresh()

    def _show(self, worker: Worker, lines: list[str]) -> None:
        if self._screen.is_verbatim:
            self._print(worker, lines)
            return
        told = [line for line in lines if not is_noise(line)]
        if self._is_interrupted:
            told = [line for line in told if not is_of_peers(line)]
        self._print(worker, self._tracebacks.take(worker.rank, told))
        if not self._tracebacks.holds(worker.rank):
            self._screen.progress(worker.rank, worker.unfinished)

    def _print(self, worker: Worker, lines: list[str]) -> None:
        for line in lines:
            self._screen.line(worker.rank, line)
            self._num_lines += 1
            self._last_line[worker.rank] = self._num_lines

    def _forget(self, worker: Worker) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.output)

    def _recall(self, failed: Worker) -> None:
        """Repeat the last lines of a worker that failed, if they are out of sight."""
        since = self._num_lines - self._last_line.get(failed.rank, self._num_lines)
        is_seen = since <= TAIL_LINES and self._screen.is_one
        if failed.tail and not is_seen:
            self._screen.recall(failed.rank, failed.tail)

    def _after_lost(self, failed: Worker) -> Worker:
        """Wait for the end of the worker that was lost, and return whose end counts.

        So it does not depend on which of them ends first.
        """
        end = time.monotonic() + LOST_EXIT_SECONDS
        while (lost := self.lost) and lost.is_running and not lost.is_suspended:
            if time.monotonic() >= end or self._signals.received:
                break
            self._turn()
        self.failed = lost if lost and lost.exit_code else failed
        return self.failed

    def _end_by_failure(self, failed: Worker) -> int:
        failed = self._after_lost(failed)
        if self._others is not None:
            self._others.tell_failure(failed, self.lost or failed)
        if failed.exit_code == PREEMPTED:
            self._wait_for_exits()
        rest = {0: "", 1: ", and the other one was stopped"}.get(
            len(self._running()), ", and the others were stopped"
        )
        self._stop(signal.SIGTERM)
        cause = self.lost or failed
        if failed.exit_code != PREEMPTED:
            self._recall(cause)
        because = "" if cause is failed else f" since worker {cause.rank} was lost"
        if self._others is None:  # else they agree on the worker to name
            self._screen.message(
                f"tfdp: worker {failed.rank} {failed.describe_end()}{because}{rest}. "
                f"All that worker {cause.rank} wrote: {cause.log.path}",
                "error",
                rank=cause.rank,
            )
        assert failed.exit_code is not None
        return shell_code(failed.exit_code)

    def _end_by_order(self, code: int, signum: int) -> int:
        if code == PREEMPTED:
            self._wait_for_exits()
        self._stop(signum)
        return code

    def _end_here(self, why: str, code: int, signum: int) -> int:
        """End the workers, and tell the other nodes, where there are any."""
        if self._others is not None:
            self._others.leave(why, code, signum)
        self._stop(signum)
        return code

    def _end_by_signal(self, signum: int) -> int:
        who, them = ("workers", "them") if len(self._workers) > 1 else ("worker", "it")
        why = f"{signal_name(signum)} received"
        self._screen.message(
            f"tfdp: {why}, stopping the {who} (once more kills {them} at once)"
        )
        code = self._end_here(why, 128 + signum, signum)
        if self.is_preempted:
            self._screen.message(
                "tfdp: training was preempted and is saved; the same command goes on "
                f"from there (exit code {PREEMPTED})"
            )
            return PREEMPTED
        return code

    def _end_by_timeout(self) -> int:
        ranks = [str(worker.rank) for worker in self._running()]
        who = "workers that still run" if len(ranks) > 1 else "worker that still runs"
        self._screen.message(
            f"tfdp: not done within --timeout, stopping the {who}: {', '.join(ranks)}",
            "error",
        )
        return self._end_here("--timeout is over", TIMED_OUT, signal.SIGTERM)

    def _stop(self, signum: int) -> None:
        """Ask the workers to end, and after a while kills what is left."""
        self._is_stopping = True
        if signum == signal.SIGINT:
            self._is_interrupted = True
            self._tracebacks.interrupt()
        for worker in self._running():
            worker.send(signum)
        self._wait_for_exits()
        # A worker inside a native collective does not react to SIGTERM.
        self._kill()
        self._turn()

    def _wait_for_exits(self) -> None:
        """Wait for the workers to end by themselves, until a second signal comes."""
        end = time.monotonic() + self._context.grace_seconds
        while self._running() and time.monotonic() < end:
            if len(self._signals.received) > 1:
                break
            self._turn()

    def _not_killed(self) -> set[int]:
        return self._strangers | self._starter.own_pids

    def _kill(self) -> None:
        """Kill the workers, and what they leave to this process until nothing is."""
        process_tree.kill_children(
            self._not_killed(), keep_zombies=[worker.pid for worker in self._workers]
        )
