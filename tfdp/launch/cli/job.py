"""Local job: worker processes that run until all are done, or one fails."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import click

from tfdp.communication.cluster import Cluster, process_tree
from tfdp.communication.coordination.preemption import PREEMPTED, SAVE_SIGNAL
from tfdp.communication.store import have_all_joined
from tfdp.features.goodput.ledger import Launch
from tfdp.launch.cli.coordinator_connection import CoordinatorConnection
from tfdp.launch.cli.launch import worker_environment
from tfdp.launch.cli.output import Output
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import EndReason, SignalPipe
from tfdp.launch.cli.start import Starter
from tfdp.launch.cli.worker import LogFile, Worker, shell_code
from tfdp.launch.rendezvous.failure import LOST_EXIT_SECONDS

# Time limits are checked once per round of the loop, so a round waits for events at
# most this many seconds.
_POLL_SECONDS = 0.1
# A worker that hangs writes no flight record, so the wait for records ends after
# `_RECORD_SECONDS`. A record that is older than `_RECENT_SECONDS` is of an earlier
# failure.
_RECORD_SECONDS, _RECENT_SECONDS = 2.0, 5.0
# While the reader of the launcher's output is slower than the workers, each round of
# the loop pauses for this many seconds and reads no output, which slows the workers
# down.
_BEHIND_SECONDS = 0.01
# The request to save is repeated after this many seconds, since a worker outside of
# `fit` does not receive a request.
_ASK_AGAIN_SECONDS = 5.0
# To check whether workers wait for one that has ended, the launcher connects to those
# that still run, so it checks at most once every this many seconds.
_CHECK_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class JobContext:
    """Objects and limits that all attempts to run a job share.

    Args:
        starter: `Starter` of the worker processes.
        screen: `Screen` that shows the output.
        signals: `SignalPipe`, open during all attempts so that no signal between two of
            them is lost. It also has the time at which `--timeout` stops the job.
        grace_seconds: Float, time between asking the workers to stop and killing them.
            Defaults to `5.0`.
        launch: `Launch`, settings of the goodput ledger, the file with the job's time
            by class, or `None` for none. Defaults to `None`.
    """

    starter: Starter
    screen: Screen
    signals: SignalPipe
    grace_seconds: float = 5.0
    launch: Launch | None = None


class Job:
    """One attempt to run the worker processes of a job on this machine.

    No process is left behind, however the attempt ends.

    Args:
        context: `JobContext` of all attempts.
        clusters: Sequence of `Cluster`, one for each worker of this machine, with
            consecutive ranks in ascending order.
        logs: Sequence of `LogFile`, one for each slot, a share of this machine.
        slots: Sequence of ints, the slot of each worker, or `None` for consecutive
            slots from 0. Defaults to `None`.
        coordinator: `CoordinatorConnection`, the connection to node 0, or `None`
            if all workers are on this machine. Defaults to `None`.
        save_after_seconds: Float, time after which workers are asked to save their
            training and exit, or `None` for never. A script that does not support such
            requests continues. Defaults to `None`.

    Attributes:
        failed: The `Worker` that failed first, or `None`. If its failure ends the job,
            the attribute changes to the worker that caused it, such as a lost one.
    """

    def __init__(
        self,
        context: JobContext,
        clusters: Sequence[Cluster],
        logs: Sequence[LogFile],
        *,
        slots: Sequence[int] | None = None,
        coordinator: CoordinatorConnection | None = None,
        save_after_seconds: float | None = None,
    ) -> None:
        self._context, self._clusters, self._logs = context, clusters, logs
        self._starter = context.starter
        self._screen, self._signals = context.screen, context.signals
        self._coordinator, self._save_after_seconds = coordinator, save_after_seconds
        self._first_rank = min(cluster.rank for cluster in clusters)
        self._slots = slots or range(len(clusters))
        self._workers: list[Worker] = []
        self.failed: Worker | None = None
        self._code = 0
        self._is_stopping = self._has_asked_to_save = False
        # Time of the next request to save. Requests are repeated, since a worker does
        # not receive those that are sent while it is outside of `fit`.
        self._ask_at = math.inf
        # The job ends if two checks in a row find that workers wait for one that has
        # ended, so the time of the next check and the result of the last one are kept.
        self._ask_waiting_at, self._has_waiting = 0.0, False
        self._num_record_requests = 0
        self._selector = selectors.DefaultSelector()
        self._output = Output(context.screen)

    def __enter__(self) -> Job:
        """Start the guard, which ends the workers if the launcher is killed."""
        self._selector.register(self._signals, selectors.EVENT_READ)
        if self._coordinator is not None:
            self._selector.register(self._coordinator, selectors.EVENT_READ)
        process_tree.adopt_orphans()
        self._guard = subprocess.Popen(
            [sys.executable, process_tree.__file__, self._starter.job],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # The job must not kill or reap these child processes, which are not workers:
        # the guard, and any from before this process became the launcher.
        self._other_children = process_tree.children()
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes of the job, and the guard."""
        self._kill()
        for worker in self._workers:
            worker.close()
        self._guard.kill()
        self._guard.communicate()
        self._selector.close()
        self._signals.read()

    @property
    def lost(self) -> Worker | None:
        """`Worker` of this machine that the failed worker names as lost, or `None`.

        The lost worker may still be alive but suspended, or end at about the same time
        as the failed one, before or after it.
        """
        worker, seen = self.failed, []
        while worker is not None and worker not in seen:
            seen.append(worker)
            index = (worker.lost_rank or 0) - self._first_rank
            if worker.lost_rank is None or not 0 <= index < len(self._workers):
                break
            worker = self._workers[index]
        return worker if worker is not self.failed else None

    @property
    def has_saved(self) -> bool:
        """Bool, whether the workers have saved and exited on the launcher's request."""
        failed = self.failed
        is_saved = failed is not None and failed.exit_code == PREEMPTED
        return is_saved and self._has_asked_to_save and self.lost is None

    @property
    def is_preempted(self) -> bool:
        """Bool, whether a worker has saved and exited because of a signal."""
        return any(worker.exit_code == PREEMPTED for worker in self._workers)

    def run(self) -> int:
        """Start the workers and wait for their end.

        Returns:
            Int, the exit code: `0`; that of the first worker that failed, or of the
            lost worker that it names, if that one fails as well; that of node 0's order
            to stop; 1 if workers wait for one that has ended; 124 after the timeout; 75
            if workers have saved their training because of a signal; 141 if the reader
            of the output has exited; or else 128 plus the number of the received
            signal.

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
        """Start the workers, run the loop until the job ends; return its exit code."""
        for index in range(len(self._clusters)):
            self._start(index)
        self._ask_at = time.monotonic() + (self._save_after_seconds or math.inf)
        while not self._is_over():
            self._poll()
            reason = self._signals.end_reason
            if reason is not None and self._signals.received:
                return self._end_by_signal(reason)
            if self.failed and (code := self._after_failure(self.failed)):
                return code
            if self._coordinator is not None and (
                order := self._coordinator.stop_order()
            ):
                self._stop_with_records(*order)
                return order[0]
            if self._screen.has_no_reader:
                code = shell_code(-signal.SIGPIPE)
                why = "the output has lost its reader"
                return self._leave(EndReason(why, code, signal.SIGTERM))
            if reason is not None:
                return self._end_by_timeout(reason)
            if self._waits_for_ended_workers():
                return self._end_stuck_wait()
            self._ask_to_save()
        return self._code

    # `_is_over`, `_after_failure` and `_environment` are separate methods so that jobs
    # that continue after a failure can override them.

    def _is_over(self) -> bool:
        """Return whether all workers have ended."""
        return not self._running()

    def _after_failure(self, failed: Worker) -> int | None:
        """End the job after a worker's failure; a subclass may continue instead.

        Returns:
            Int, the exit code of the job, or `None` if it continues.
        """
        return self._end_by_failure(failed)

    def _environment(self, index: int) -> dict[str, str]:
        """Return the environment variables of a worker.

        Args:
            index: Int, index of the worker among those of this machine.
        """
        return worker_environment(
            self._clusters[index],
            self._slots[index],
            len(self._logs),
            self._starter.job,
            num_local=len(self._clusters),
            log_folder=self._logs[index].path.parent,
            launch=self._context.launch,
        )

    def _ask_to_save(self) -> None:
        """Send running workers `SAVE_SIGNAL` once `save_after_seconds` have passed.

        The signal asks them to save and exit. It is repeated every
        `_ASK_AGAIN_SECONDS`; calls at other times have no effect.
        """
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at, self._has_asked_to_save = now + _ASK_AGAIN_SECONDS, True
            for worker in self._running():
                worker.send(SAVE_SIGNAL)

    def _running(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self._workers if worker.is_running]

    def _start(self, index: int) -> None:
        """Start worker `index` of this machine, or start it again after its end."""
        start = functools.partial(self._starter.start, self._environment(index))
        worker = Worker(self._first_rank + index, start, self._logs[index])
        self._workers[index : index + 1] = [worker]
        self._selector.register(worker.output, selectors.EVENT_READ, data=worker)
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.write(f"{worker.pid}\n".encode())
            self._guard.stdin.flush()

    def _poll(self) -> None:
        """Wait for events, show new output, and check which workers have ended.

        The first worker that fails while the job is not being stopped becomes `failed`.
        """
        ready: list[tuple[selectors.SelectorKey, int]] = []
        if self._screen.is_behind and not self._is_stopping:
            # No output is read in this round of the loop: full pipes slow the workers
            # down to the speed of the reader of the launcher's output.
            time.sleep(_BEHIND_SECONDS)
        else:
            ready = self._selector.select(_POLL_SECONDS)
        self._signals.read()
        self._forward_record_requests()
        process_tree.reap_children(
            self._spared_pids().union(w.pid for w in self._workers)
        )
        ended = [worker for worker in self._workers if worker.poll()]
        # The output of failed workers is shown first, since the last lines of the other
        # workers are likely to report these failures.
        for worker in sorted(ended, key=lambda worker: not worker.exit_code):
            self._output.show_rest(worker)
            self._forget(worker)
            if worker.exit_code and not self.failed and not self._is_stopping:
                self.failed = worker
        for key, _ in ready:
            if key.data is not None and key.data.is_running:
                self._output.show(key.data, key.data.read())
                # A pipe that the worker has closed would always be ready, so it is not
                # watched any more, though the worker may continue to run.
                if key.data.output.has_ended:
                    self._forget(key.data)
        for worker in self._running():
            self._output.show_due(worker)
        self._screen.refresh()

    def _forget(self, worker: Worker) -> None:
        """Stop watching the output of a worker, which has ended or closed it."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.output)

    def _wait_for_cause(self, failed: Worker) -> Worker:
        """Wait until the worker that explains a failure ends; return the cause.

        The cause is the worker that `failed` names as lost, or the one with the same
        error whose traceback is shown. The wait makes the result independent of which
        of the two ends first. The wait ends early at a signal, if the other worker is
        suspended, or after `LOST_EXIT_SECONDS`.

        Args:
            failed: `Worker` that failed first.

        Returns:
            `Worker`, the other one if it has also failed, otherwise `failed`. It is
            also stored as `self.failed`.
        """
        same = self._workers[self._output.shown_for(failed.rank) - self._first_rank]
        end = time.monotonic() + LOST_EXIT_SECONDS
        while (other := self.lost or same).is_running and not other.is_suspended:
            if time.monotonic() >= end or self._signals.received:
                break
            self._poll()
        self.failed = other if other.exit_code else failed
        return self.failed

    def _end_by_failure(self, failed: Worker) -> int:
        """Stop all workers after a failure, and return the exit code of its cause.

        The failure is printed; in a job on several nodes, it is reported to node 0,
        which names it to all nodes.
        """
        failed = self._wait_for_cause(failed)
        if self._coordinator is not None:
            self._coordinator.report_failure(failed, self.lost or failed)
        assert failed.exit_code is not None
        num_stopped = self._stop_with_records(failed.exit_code, signal.SIGTERM)
        rest = {0: "", 1: ", and the other one was stopped"}.get(
            num_stopped, ", and the others were stopped"
        )
        cause = self.lost or failed
        if failed.exit_code != PREEMPTED:
            self._output.repeat_last_lines(cause)
        because = "" if cause is failed else f" since worker {cause.rank} was lost"
        # In a job on several nodes, node 0 names the failed worker to all nodes, so
        # this node does so only if node 0 is lost.
        if self._coordinator is None or self._coordinator.has_lost_node_0:
            self._screen.message(
                f"tfdp: worker {failed.rank} {failed.describe_end()}{because}{rest}. "
                f"Full output of worker {cause.rank}: {cause.log.path}",
                "error",
                rank=cause.rank,
            )
        self._name_records(cause.log.path.parent)
        return shell_code(failed.exit_code)

    def _stop_with_records(self, code: int, signum: int) -> int:
        """Let the workers save or write flight records, and stop those that still run.

        If `code` is `PREEMPTED`, they have the grace period to save and exit by
        themselves. Otherwise they are asked to write their flight records.

        Args:
            code: Int, exit code of the job, `PREEMPTED` if a worker has saved.
            signum: Int, signal that the workers receive.

        Returns:
            Int, number of workers that still ran.
        """
        if code == PREEMPTED:
            self._wait_for_exits()
        else:
            self._request_records()
        num_running = len(self._running())
        self._stop(signum)
        return num_running

    def _leave(self, reason: EndReason) -> int:
        """Notify node 0 if there is one, stop the workers, and return the exit code."""
        if self._coordinator is not None:
            self._coordinator.leave(reason)
        self._stop(reason.signum)
        return reason.code

    def _end_by_signal(self, reason: EndReason) -> int:
        """Stop the workers after a signal to the launcher; return the exit code."""
        who, them = ("workers", "them") if len(self._workers) > 1 else ("worker", "it")
        self._screen.message(
            f"tfdp: {reason.why}, stopping the {who} (a second one kills {them} at "
            "once)"
        )
        code = self._leave(reason)
        if self.is_preempted:
            self._screen.message(
                "tfdp: training was preempted and is saved; run the same command to "
                f"continue from there (exit code {PREEMPTED})"
            )
            return PREEMPTED
        return code

    def _end_by_timeout(self, reason: EndReason) -> int:
        """Stop the workers after `--timeout`, and return the exit code, `TIMED_OUT`."""
        ranks = [str(worker.rank) for worker in self._running()]
        who = "workers that still run" if len(ranks) > 1 else "worker that still runs"
        self._screen.message(
            f"tfdp: not done within --timeout, stopping the {who}: {', '.join(ranks)}",
            "error",
        )
        self._request_records()
        self._name_records(self._logs[0].path.parent)
        return self._leave(reason)

    def _waits_for_ended_workers(self) -> bool:
        """Return whether running workers wait for ended ones to join the cluster.

        Once a worker or all workers of another node have ended with exit code 0, the
        running workers are asked whether they wait for others to join. Two answers in
        a row must confirm it: a worker may join and end before the others notice it.
        """
        has_ended = any(worker.exit_code == 0 for worker in self._workers) or (
            self._coordinator is not None and self._coordinator.done_node is not None
        )
        if not has_ended or time.monotonic() < self._ask_waiting_at:
            return False
        self._ask_waiting_at = time.monotonic() + _CHECK_SECONDS
        pairs = zip(self._workers, self._clusters, strict=True)
        running = [each.workers[each.rank] for w, each in pairs if w.is_running]
        before = self._has_waiting
        has_joined = have_all_joined(self._clusters[0], running)
        self._has_waiting = has_joined is False
        if has_joined:  # all have joined, so none waits any more
            self._ask_waiting_at = math.inf
        return before and self._has_waiting

    def _end_stuck_wait(self) -> int:
        """Stop workers that wait for others that have ended; return exit code 1."""
        ended = next((w for w in self._workers if w.exit_code == 0), None)
        if ended is not None:
            who = f"worker {ended.rank}"
            more = f" Full output of {who}: {ended.log.path}"
        else:
            assert self._coordinator is not None
            who, more = f"the workers of node {self._coordinator.done_node}", ""
        why = f"{who} ended with exit code 0 without creating a strategy"
        self._screen.message(
            f"tfdp: {why}, for which the rest of the job waits.{more}",
            "error",
            rank=None if ended is None else ended.rank,
        )
        return self._leave(EndReason(f"{why}, as seen", 1, signal.SIGTERM))

    def _stop(self, signum: int) -> None:
        """Ask the workers to exit, and kill those that outlast the grace period.

        Args:
            signum: Int, the signal that asks them to exit.
        """
        self._is_stopping = True
        if signum == signal.SIGINT:
            self._output.interrupt()
        for worker in self._running():
            worker.send(signum)
        self._wait_for_exits()
        # A worker inside a native collective does not react to SIGTERM, so it is
        # killed.
        self._kill()
        self._poll()

    def _request_records(self) -> None:
        """Have the workers write their flight records, and wait up to 2 s for them.

        Call this before a SIGTERM, which would end the workers before they have found
        out that another one is lost.
        """
        asked = [w for w in self._running() if w.request_record()]
        since = time.time() - _RECENT_SECONDS
        end = time.monotonic() + _RECORD_SECONDS
        while time.monotonic() < end and not self._signals.received:
            if all(not w.is_running or w.has_record(since) for w in asked):
                break
            self._poll()

    def _name_records(self, folder: pathlib.Path) -> None:
        """Print the command that shows the flight records, if there are any.

        Args:
            folder: `Path` of the folder of logs.
        """
        since = time.time() - _RECENT_SECONDS - self._context.grace_seconds
        if any(worker.has_record(since) for worker in self._workers):
            command = f"tfdp doctor {shlex.quote(str(folder))}"
            self._screen.message(f"tfdp: who was where when it failed: {command}")

    def _forward_record_requests(self) -> None:
        """Have the workers write their flight records, if a signal has asked for it."""
        if self._num_record_requests < self._signals.num_record_requests:
            self._num_record_requests = self._signals.num_record_requests
            for worker in self._running():
                worker.request_record()

    def _wait_for_exits(self) -> None:
        """Wait until all workers have exited.

        The wait ends after the grace period, or at a second signal.
        """
        end = time.monotonic() + self._context.grace_seconds
        while self._running() and time.monotonic() < end:
            if len(self._signals.received) > 1:
                break
            self._poll()

    def _spared_pids(self) -> set[int]:
        """Return the ids of child processes that must not be killed or reaped.

        They are the guard, which ends the workers if the launcher is killed; children
        that this process had before it became the launcher; and the process that forks
        workers, if there is one.
        """
        return self._other_children | self._starter.helper_pids

    def _kill(self) -> None:
        """Kill the workers, and all orphaned descendants that this process adopts."""
        process_tree.kill_children(
            self._spared_pids(), keep_zombies=[worker.pid for worker in self._workers]
        )
