"""State machine of a job on several nodes, run by node 0.

    gathering -> preparing -> running -> stopping -> pausing -> gathering ...
                                 |           |
                                 +-> ended <-+

All nodes join, report free ports, and start their workers together. The first failure
of a worker or a node stops the workers of all nodes. Once they have ended, the restart
policy decides whether all start again. A lost node may come back until then.

A notice is a text for the screens of all nodes. `clock_seconds` is the current time.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tfdp.communication.cluster.tf_config import shorten
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import (
    LOST_EXIT_SECONDS,
    NODE_LOST,
    Failure,
    MalformedMessage,
    RendezvousError,
    from_message,
)
from tfdp.launch.rendezvous.link import HeartbeatConnection
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import DOUBTFUL_SECONDS, Hello, Node, Reports, Roster

# A node whose worker is reported as lost may report the cause itself. If the node is
# silent already, the wait for its report is only this many seconds.
_SETTLE_SECONDS = 1.0
# The notice about missing nodes shows users that the job waits, so it is repeated after
# this many seconds.
_NOTICE_SECONDS = 10.0
# A node that has not stopped its workers is dropped after this many seconds, in
# addition to two grace periods: one to save, and one to exit.
_STOP_SECONDS = 30.0
# The workers of a node share its IP address, so the addresses of all workers are an IP
# address and a list of ports for each node, by rank.
NodeAddresses: TypeAlias = list[tuple[str, list[int]]]


class Phase(enum.Enum):
    """Phase of a job on several nodes, from waiting for nodes to the job's end."""

    GATHERING = "waits for nodes"
    PREPARING = "waits for the ports of all"
    RUNNING = "workers run"
    STOPPING = "workers are being stopped"
    PAUSING = "waits before the next attempt"
    ENDED = "is over"


class Coordinator:
    """State machine on node 0 that starts, stops and restarts a job on several nodes.

    All calls come from one thread.

    Args:
        node_0: `Hello` of node 0, which those of the other nodes must match.
        join_seconds: Float, seconds to wait for missing nodes.
        make_restarts: Function that maps the number of workers of all nodes to the
            `Restarts` policy of the job.
        clock: Function that returns seconds. Defaults to `time.monotonic`.

    Attributes:
        phase: `Phase` of the job.
    """

    def __init__(
        self,
        node_0: Hello,
        join_seconds: float,
        make_restarts: Callable[[int], Restarts],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = Phase.GATHERING
        self._join_seconds = join_seconds
        self._make_restarts = make_restarts
        self._restarts: Restarts | None = None
        self._clock = clock
        self._roster = Roster(node_0)
        self._attempt = 0
        # The secret of the workers is derived from this id of the attempt, so workers
        # of different attempts cannot connect.
        self._id = ""
        self._has_started = False
        self._started_at = self._noticed_at = self._stopped_at = clock()
        # Nodes may never join or report their ports, so the wait for them ends at this
        # time; so does the pause before a restart.
        self._until = clock() + join_seconds
        self._reports = Reports(self._roster)
        self._decide_at: float | None = None
        # The failure that stopped all workers determines whether the job starts again;
        # otherwise the job exits with `_code`. The failure is `None` if the job was
        # asked to end.
        self._code = 0
        self._failure: Failure | None = None
        # Workers that save a checkpoint because of a signal exit with this code, and
        # the job exits with the same, so the caller can start it again.
        self._saved_code: int | None = None
        # `tick` calls the method of the present phase, which may begin the next one.
        # `ENDED` has none, since a job that is over does nothing.
        self._phase_steps = {
            Phase.GATHERING: self._advance_gathering,
            Phase.PREPARING: self._advance_preparing,
            Phase.RUNNING: self._advance_running,
            Phase.STOPPING: self._advance_stopping,
            Phase.PAUSING: self._advance_pausing,
        }

    @property
    def is_over(self) -> bool:
        """Bool, whether the job has ended."""
        return self.phase is Phase.ENDED

    def join(self, link: HeartbeatConnection, hello: Hello) -> None:
        """Add a node to the job; if workers were started before, notify all nodes.

        Args:
            link: `HeartbeatConnection` to the node.
            hello: `Hello` of the node.

        Raises:
            RendezvousError: If the node cannot join this job.
        """
        if hello.node_rank is not None:
            self._replace_silent(hello.node_rank)
        if sentence := self._roster.why_refused(hello):
            raise RendezvousError(sentence)
        is_back = self._has_started
        node = self._roster.add(link, hello)
        if is_back:
            self._send_notice(self._join_notice(node))

    def _join_notice(self, node: Node) -> str:
        """Return a notice about a lost node that joins a started job again."""
        return f"{node} has reconnected, and joins at the next start"

    def receive(self, link: HeartbeatConnection, message: Mapping[str, Any]) -> None:
        """Handle a message of a node, such as its ports or the failure of a worker.

        When a node's workers have ended without an error, all nodes receive `"done"`.

        Args:
            link: `HeartbeatConnection` to the node.
            message: Mapping, the message.

        Raises:
            MalformedMessage: If the message does not follow the protocol.
        """
        node = self._roster.node_of_link(link)
        if node is None or self.is_over:
            return
        kind = message.get("type")
        if kind == "leaving":
            self._handle_leave(node, message)
        elif message.get("attempt") != self._attempt:
            return  # the message belongs to an earlier attempt
        elif kind == "ports":
            node.ports = _ports(message, node.hello.num_workers)
        elif kind == "failed":
            self._handle_failure(node, from_message(Failure, message))
        elif kind == "done":
            node.is_done = node.has_stopped = True
            self._send_all("done", node=node.rank)
        elif kind == "stopped":
            node.has_stopped = True
            code = message.get("code")
            if message.get("has_saved") is True and isinstance(code, int):
                self._saved_code = code

    def register_disconnect(self, link: HeartbeatConnection, how: str) -> None:
        """Remove the node whose connection has ended, and handle its loss.

        In the phase `PREPARING` the job waits for all nodes again. In `RUNNING`, unless
        the node's workers are done, `_handle_loss` stops all workers or continues
        without it.

        Args:
            link: `HeartbeatConnection` to the node.
            how: String for messages, such as `"has ended its connection"`.
        """
        node = self._roster.node_of_link(link)
        if node is None or self.is_over:
            return
        self._roster.nodes.remove(node)
        if self.phase is Phase.PREPARING:
            self._gather()
        elif self.phase is Phase.RUNNING and not node.is_done:
            self._handle_loss(node, how)

    def tick(self) -> None:
        """Begin the next phase of the job if the present one has ended.

        The server calls this method every 50 ms.
        """
        if not self.is_over:
            self._phase_steps[self.phase](self._clock())

    def _advance_gathering(self, clock_seconds: float) -> None:
        """Begin an attempt once all nodes have joined; end the job if some do not.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        if self._roster.is_complete:
            self._prepare()
        elif clock_seconds >= self._until:
            self._give_up()
        elif clock_seconds - self._noticed_at >= _NOTICE_SECONDS:
            self._noticed_at = clock_seconds
            here = len(self._roster.nodes)
            self._send_notice(
                f"waiting for {self._roster.describe_missing()}; {here} of "
                f"{pluralize(self._roster.least, 'node')} "
                f"{'has' if here == 1 else 'have'} joined"
            )

    def _advance_preparing(self, clock_seconds: float) -> None:
        """Start the workers once all nodes have reported their ports.

        If two nodes have reported the same address, all are asked again. If a node has
        not reported after `join_seconds`, the job ends.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        if all(node.ports is not None for node in self._roster.nodes):
            places = self._places()
            addresses = [(host, port) for host, ports in places for port in ports]
            # Two nodes on one machine may report the same free port, so all nodes are
            # then asked again.
            is_unique = len(set(addresses)) == len(addresses)
            self._start(places) if is_unique else self._prepare()
        elif clock_seconds >= self._until:
            self._give_up()

    def _advance_running(self, clock_seconds: float) -> None:
        """Stop the workers because of reported failures, or end a job that is done.

        A failure whose cause may still be reported stops the workers only after a
        delay.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        if self._decide_at is not None and clock_seconds >= self._decide_at:
            self._decide()
        elif all(node.is_done for node in self._roster.nodes):
            self._end(0)

    def _advance_stopping(self, clock_seconds: float) -> None:
        """Restart or end the job once all nodes have stopped; drop nodes that do not.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        seconds = clock_seconds - self._stopped_at
        for node in [n for n in self._roster.nodes if not n.has_stopped]:
            if seconds >= 2 * node.hello.grace_seconds + _STOP_SECONDS:
                self._drop(node, seconds)
        if all(node.has_stopped for node in self._roster.nodes):
            self._after_stop(clock_seconds)

    def _advance_pausing(self, clock_seconds: float) -> None:
        """Wait for all nodes again once the pause before a restart is over.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        if clock_seconds >= self._until:
            self._gather()

    def _give_up(self) -> None:
        """End the job because nodes are missing after `join_seconds`."""
        here = len(self._roster.nodes)
        came = "joined"
        if self._has_started:
            came = "is connected" if here == 1 else "are connected"
        self._end(
            self._code or NODE_LOST,
            f"waited {self._join_seconds:g} s for "
            f"{pluralize(self._roster.least, 'node')}, but {here} {came}: "
            f"{self._roster.describe_connected()}. Start the same `tfdp run` on the "
            "others, and check that they reach the rendezvous",
        )

    def _replace_silent(self, rank: int) -> None:
        """Drop the node of a rank that a joining node requests, if it is silent."""
        old = self._roster.node_at_rank(rank)
        if old is not None and old.link.silent_seconds > DOUBTFUL_SECONDS:
            self.register_disconnect(old.link, "has opened another connection")

    def _drop(self, node: Node, seconds: float) -> None:
        """Remove a node that has not stopped its workers; the job continues without it.

        The node's launcher receives an order to end.

        Args:
            node: `Node` that is connected.
            seconds: Float, time since the workers were asked to stop, for messages.
        """
        text = f"{node} has not stopped its workers within {seconds:.0f} s"
        node.link.send({"type": "end", "code": self._code, "text": text})
        self.register_disconnect(node.link, "has not stopped")
        self._send_notice(f"{text}; the job continues without it")

    def _gather(self) -> None:
        """Begin to wait until all nodes are connected, for up to `join_seconds`."""
        if not self._has_started:
            self._roster.revoke_ranks()
        self.phase = Phase.GATHERING
        self._until = self._clock() + self._join_seconds
        # The time of the last notice is set to the past, so the next tick sends a
        # notice about the missing nodes.
        self._noticed_at = self._clock() - _NOTICE_SECONDS

    def _prepare(self) -> None:
        """Begin an attempt: send all nodes their ranks, and ask for ports."""
        if not self._roster.has_assigned_ranks:
            self._roster.assign_ranks()
        self._roster.nodes.sort(key=lambda node: node.rank or 0)
        self._attempt += 1
        self.phase = Phase.PREPARING
        self._until = self._clock() + self._join_seconds
        for node in self._roster.nodes:
            self._ask_for_ports(node)

    def _ask_for_ports(self, node: Node) -> None:
        """Send a node its rank, and ask for the ports of its workers."""
        node.ports, node.ports_attempt, node.has_started = None, self._attempt, False
        node.link.send(
            {
                "type": "prepare",
                "attempt": self._attempt,
                "node_rank": node.rank,
                "first_rank": self._roster.first_rank(node),
                "num_workers": self._roster.num_workers,
            }
        )

    def _places(self) -> NodeAddresses:
        """List the IP address and the worker ports of each node."""
        hosts = self._roster.hosts()
        ports = [node.ports or [] for node in self._roster.nodes]
        return list(zip(hosts, ports, strict=True))

    def _start(self, places: NodeAddresses) -> None:
        """Order all nodes to start their workers, and send them all addresses."""
        self._reports, self._decide_at = Reports(self._roster), None
        self._code, self._failure, self._saved_code = 0, None, None
        self.phase, self._started_at = Phase.RUNNING, self._clock()
        self._has_started, self._id = True, secrets.token_hex(8)
        for node in self._roster.nodes:
            self._start_node(node, places)

    def _start_node(
        self, node: Node, places: NodeAddresses, *, is_late: bool = False
    ) -> None:
        """Order a node to start its workers, and send it the addresses of all workers.

        Args:
            node: `Node`.
            places: The IP address and the worker ports of each node.
            is_late: Bool, whether the workers of other nodes train already. Defaults to
                `False`.
        """
        node.is_done = node.has_stopped = node.is_leaving = False
        node.has_started = True
        node.link.send(
            {
                "type": "start",
                "attempt": self._attempt,
                "id": self._id,
                "nodes": places,
                "is_late": is_late,
            }
        )

    def _handle_failure(self, node: Node, failure: Failure) -> None:
        """Record a failed worker; stop all workers now, or after a wait for its cause.

        The wait is for a report of the worker that the failed one names as lost. Unless
        the phase is `RUNNING`, the failure is ignored.

        Raises:
            MalformedMessage: If the node does not have this worker.
        """
        if not self._roster.has_worker(node, failure.rank):
            raise MalformedMessage
        if self.phase is not Phase.RUNNING:
            return
        if self._reports.add(failure):
            self._decide()
        elif self._decide_at is None and failure.lost_rank is not None:
            is_silent = self._roster.silent_seconds(failure.lost_rank) is not None
            seconds = _SETTLE_SECONDS if is_silent else LOST_EXIT_SECONDS
            self._decide_at = self._clock() + seconds

    def _decide(self) -> None:
        """Find the cause of the reported failures, and stop all nodes' workers."""
        cause = self._reports.cause()
        sentence = self._reports.sentence()
        self._stop(cause.code, cause, sentence, rank=cause.rank)

    def _handle_loss(self, node: Node, how: str) -> None:
        """Stop the workers of all nodes because a node was lost.

        Args:
            node: The lost `Node`.
            how: String, such as `"has ended its connection"`.
        """
        first = self._roster.first_rank(node)
        failure = Failure(first, NODE_LOST, f"was lost with {node}, which {how},")
        self._stop(
            NODE_LOST,
            failure,
            f"{node} was lost: it {how}; the workers of all nodes were stopped",
        )

    def _handle_leave(self, node: Node, message: Mapping[str, Any]) -> None:
        """End the job because a node leaves; before workers start, only drop the node.

        If workers run, all nodes stop theirs first. If node 0 leaves, the job ends in
        any case.

        Args:
            node: `Node` that leaves.
            message: Mapping with `"code"`, an int, the exit code of the job;
                `"signal"`, an int, the signal for the workers; and `"why"`, a string.

        Raises:
            MalformedMessage: If the code, the signal or the reason has a wrong type.
        """
        why, code = message.get("why"), message.get("code")
        signum = message.get("signal")
        are_ints = isinstance(code, int) and isinstance(signum, int)
        if not are_ints or not isinstance(why, str):
            raise MalformedMessage
        assert isinstance(code, int)
        if not self._has_started and node.hello.node_rank != 0:
            node.link.send({"type": "end", "code": code, "text": ""})
            self.register_disconnect(node.link, "has left")
        elif self.phase is Phase.RUNNING:
            order = {"signal": signum, "by": node.rank}
            self._stop(code, None, f"{shorten(why)} on {node}: all stop", **order)
        elif self.phase is Phase.STOPPING:
            self._code, self._failure = code, None
        else:
            self._end(code, f"{shorten(why)} on {node}: the job ends")

    def _stop(
        self, code: int, failure: Failure | None, text: str, **order: Any
    ) -> None:
        """Stop the workers of all nodes.

        Args:
            code: Int, exit code of the job unless it starts again.
            failure: `Failure` that is the reason, or `None` if the job shall end.
            text: String, the reason, for the screens of all nodes.
            **order: Further fields of the message that all nodes receive.
        """
        self._code, self._failure = code, failure
        self.phase, self._stopped_at = Phase.STOPPING, self._clock()
        self._send_all("stop", attempt=self._attempt, code=code, text=text, **order)

    def _after_stop(self, clock_seconds: float) -> None:
        """End the job or announce its restart, after all workers have ended.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        failure = self._failure
        if failure is None:
            code = self._code
            self._end(code if self._saved_code is None else self._saved_code)
            return
        seconds = clock_seconds - self._started_at
        if self._restarts is None:
            self._restarts = self._make_restarts(self._roster.num_workers)
        decision = self._restarts.decide(failure, seconds)
        if decision is None:
            self._end(self._code)
            return
        self.phase, self._until = Phase.PAUSING, clock_seconds + decision.pause_seconds
        self._send_all("restart", text=decision.line)

    def _end(self, code: int, text: str = "") -> None:
        """End the job with an exit code, and send the reason to all nodes."""
        self.phase = Phase.ENDED
        self._send_all("end", code=code, text=text)

    def _send_notice(self, text: str) -> None:
        """Send all nodes a text for their screens."""
        self._send_all("notice", text=text)

    def _send_all(self, kind: str, **fields: Any) -> None:
        """Send all nodes a message of the type `kind`, with further fields."""
        for node in self._roster.nodes:
            node.link.send({"type": kind, **fields})


def _ports(message: Mapping[str, Any], num_workers: int) -> list[int]:
    """Return the ports in a node's message, one for each of its workers.

    Raises:
        MalformedMessage: If the number or the range of the ports is wrong.
    """
    ports = message.get("ports")
    is_valid = isinstance(ports, list) and len(ports) == num_workers
    if not is_valid or not all(each in range(1, 65536) for each in ports or ()):
        raise MalformedMessage
    return list(ports or ())
