"""Connection of a node's launcher to node 0, which coordinates the job."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tfdp
from tfdp.communication.connection.handshake import (
    ConnectionFailed,
    UnauthenticatedPeer,
)
from tfdp.communication.connection.secret import (
    VARIABLE,
    line_to_paste,
    new_secret,
    read_secret,
)
from tfdp.ground.text import pluralize
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.node_options import NodeOptions, NodeRange
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.signals import EndReason
from tfdp.launch.cli.worker import Worker
from tfdp.launch.rendezvous.address import check_resolves, listen, own_address
from tfdp.launch.rendezvous.coordinator import Coordinator, NodeAddresses
from tfdp.launch.rendezvous.elastic_coordinator import ElasticCoordinator
from tfdp.launch.rendezvous.failure import NODE_LOST, RendezvousError
from tfdp.launch.rendezvous.job_probe import JobProbe
from tfdp.launch.rendezvous.node_0_connection import Node0Connection
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import Hello
from tfdp.launch.rendezvous.server import Server

# The user may start a lost node 0 again at any time, so the other nodes try to connect
# to it at this interval in seconds.
_REJOIN_SECONDS = 1.0


class CoordinatorConnection(Node0Connection):
    """Connection of this node's launcher to node 0, which controls the job.

    Args:
        screen: `Screen` that shows notices of node 0.
        **connection: Arguments of `Node0Connection`.

    Attributes:
        attempt: Int, number of the running attempt, or 0 before the first.
        done_node: Int, number of a node whose workers have ended without an error in
            this attempt, or `None`.
        has_left: Bool, whether this node has left the job because of a signal or a
            timeout.
        has_lost_node_0: Bool, whether this node continues after the loss of node 0.
    """

    def __init__(self, screen: Screen, **connection: Any) -> None:
        super().__init__(**connection)
        self.attempt = 0
        self.done_node: int | None = None
        self.has_left = self.has_lost_node_0 = False
        self._screen = screen

    def pop_message(self) -> dict[str, Any] | None:
        """Return and remove the next message of node 0, or `None` if there is none.

        Two types are handled here and not returned: notices are printed, and the number
        of a node that is done is stored as `done_node`.
        """
        while (message := super().pop_message()) is not None:
            match message.get("type"):
                case "notice":
                    self._screen.message(f"tfdp: {message.get('text')}")
                case "done":
                    self.done_node = message["node"]
                case _:
                    break
        return message

    def stop_order(self) -> tuple[int, int] | None:
        """Return the exit code and signal to stop this node's `Job` with, or `None`.

        Any message from `pop_message` stops it, such as the loss of node 0; only an
        order to stop an earlier attempt is dropped. The code is `NODE_LOST` and the
        signal SIGTERM if the message has none. The message stays in the queue:
        `NodeAttempts` handles it after the end of the `Job`.
        """
        message = self.pop_message()
        if message is None:
            return None
        if message.get("type") == "stop" and message.get("attempt") != self.attempt:
            return None
        self.put_back(message)
        code = message.get("code")
        signum = message.get("signal", signal.SIGTERM)
        return code if isinstance(code, int) else NODE_LOST, signum

    def report_failure(self, failed: Worker, cause: Worker) -> None:
        """Report a failed worker of this node, and the cause of its failure, to node 0.

        Args:
            failed: `Worker` that was seen to fail first.
            cause: `Worker` of this node that `failed` names as lost, or `failed`.
        """
        for worker in [cause, failed] if cause is not failed else [failed]:
            if worker.exit_code:
                self.send(worker.failure.to_message(self.attempt))

    def report(self, kind: str, **message: Any) -> None:
        """Send node 0 a message about this attempt.

        Args:
            kind: String, type of the message.
            **message: Further fields of the message.
        """
        self.send({"attempt": self.attempt, "type": kind, **message})

    def report_end(self, code: int, *, has_saved: bool) -> None:
        """Report to node 0 that all workers of this node have ended.

        Args:
            code: Int, exit code of the workers; 0 if all are done.
            has_saved: Bool, whether training was saved because of a signal.
        """
        self.report("stopped" if code else "done", code=code, has_saved=has_saved)

    def leave(self, reason: EndReason) -> None:
        """Report to node 0 that this node leaves the job, and set `has_left`.

        Node 0 decides whether the job ends for all nodes or continues without this one.
        """
        self.has_left = True
        why, code, signum = reason
        self.report("leaving", why=why, code=code, signal=int(signum))


class ElasticCoordinatorConnection(CoordinatorConnection):
    """Connection to node 0 of a node whose workers outlive the loss of any other node.

    If node 0 is started again, this node joins it again, with its workers if they
    train.

    Args:
        *arguments: Arguments of `CoordinatorConnection`.
        **connection: Further arguments of `CoordinatorConnection`.

    Attributes:
        places: The IP address and the worker ports of each node, once they have changed
            while workers run, or else `None`.
        running: Dict of the `Hello` fields `node_rank`, `attempt`, `attempt_id` and
            `ports` of the workers that run on this node; empty if none do.
        has_trained: Bool, whether these workers have begun to train.
        is_job_running: Callable that returns whether these workers train, with or
            without those of other nodes.
    """

    def __init__(self, *arguments: Any, **connection: Any) -> None:
        self.places: NodeAddresses | None = None
        self.running: dict[str, Any] = {}
        self.has_trained = self._is_refused = False
        self.is_job_running: Callable[[], bool] = lambda: False
        self._first_hello: Hello = connection["hello"]
        self._is_waiting_for_node_0 = False
        # `super().__init__` is called last, since it starts the thread, which reads the
        # attributes above.
        super().__init__(*arguments, **connection)

    def pop_message(self) -> dict[str, Any] | None:
        """Return and remove the next message of node 0, or `None` if there is none.

        These are handled here and not returned: notices, new addresses of the nodes,
        the start of training, the return of node 0, and, while workers of this node
        train, the loss of node 0 and its refusal of this node.
        """
        while (message := super().pop_message()) is not None:
            match message.get("type"):
                case "places":
                    self.places = message["nodes"]
                case "trains":
                    self.has_trained = True
                case "lost" if self.running and (
                    self.has_trained or self.is_job_running()
                ):
                    # Node 0 may be lost before it has reported that the workers train,
                    # so `has_trained` is set here instead.
                    self.has_trained = True
                    self.has_lost_node_0 = True
                    self._screen.message(
                        f"tfdp: {message['text']}; the workers of this node continue, "
                        "and no other node can join until the same `tfdp run` is "
                        "started there again",
                        "warning",
                    )
                case "found":
                    self.has_lost_node_0 = False
                case "refused" if self.running and self.has_trained:
                    self._is_refused = self.has_lost_node_0 = True
                    self._screen.message(f"tfdp: {message['text']}", "warning")
                case _:
                    return message
        return None

    @property
    def is_node_0(self) -> bool:
        """Bool, whether the launcher of this process is the one of node 0."""
        return self._first_hello.node_rank == 0

    def rejoin_node_0(self, text: str) -> None:
        """Print that node 0 is lost, and let the connection's thread join a new one.

        The thread tries to reach the new node 0 for `join_seconds`. Call this method
        only while this node has no workers that train.

        Args:
            text: String, how node 0 was lost.
        """
        self._screen.message(
            f"tfdp: {text}; this node waits up to {self._join_seconds:g} s until the "
            "same `tfdp run` is started there again",
            "warning",
        )
        self.has_trained, self._is_waiting_for_node_0 = False, True

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to node 0, unless node 0 is lost."""
        if not self.has_lost_node_0:
            super().send(message)

    def _run(self) -> None:
        """Join node 0, and join again after its loss; runs in the connection's thread.

        The method returns when the connection is closed or node 0 refuses this node.
        """
        self._stay_connected()
        while not (self._is_closed.wait(_REJOIN_SECONDS) or self._is_refused):
            if self.running and self.has_trained:
                self._hello = dataclasses.replace(self._hello, **self.running)
                # A suppressed error means that node 0 does not answer yet, or that
                # another process has its port: the next iteration dials again.
                with contextlib.suppress(ConnectionFailed, UnauthenticatedPeer):
                    link = self._dial()
                    self._put({"type": "found"})
                    self._stay_connected(link)
            elif self._is_waiting_for_node_0:
                self._is_waiting_for_node_0, self._hello = False, self._first_hello
                self._stay_connected()


@contextlib.contextmanager
def join_nodes(
    where: NodeOptions, settings: RunSettings, secret: str | None, screen: Screen
) -> Iterator[CoordinatorConnection]:
    """Join the job as a node; run node 0's server if this node is node 0.

    Args:
        where: `NodeOptions` with `nodes` and `rendezvous`.
        settings: `RunSettings` of this node.
        secret: String, the job's secret, or `None` to read it from the file that
            `TFDP_JOB_SECRET_FILE` names. If that is not set, node 0 generates one.
        screen: `Screen` for messages.

    Yields:
        `CoordinatorConnection`.

    Raises:
        RendezvousError: If node 0 cannot listen, or there is no secret.
    """
    nodes, place = where.nodes, where.rendezvous
    assert nodes is not None
    assert place is not None
    hello = _hello_of(nodes, where.node_rank, settings)
    secret = read_secret() if secret is None else secret
    listener, address = None, (place.host, place.port)
    if where.node_rank in (None, 0):
        listener = listen(*place, is_node_0=where.node_rank == 0)
    with contextlib.ExitStack() as stack:
        if listener is None:
            check_resolves(place.host)
            if secret is None:
                raise RendezvousError(
                    f"This machine is not node 0 of {place}, and does not have the "
                    "job's secret: paste the line that node 0 prints, or give all "
                    f"nodes a file with the same secret. Received: no {VARIABLE}"
                )
            screen.message(f"tfdp: this node joins {place}")
        else:
            is_new, secret = secret is None, secret or new_secret()
            hello = dataclasses.replace(hello, node_rank=0)
            address = own_address(listener)
            # `Restarts` gets no `min_workers`, since the number of workers of a node is
            # fixed.
            restarts = functools.partial(Restarts, max_restarts=settings.max_restarts)
            options = (hello, where.join_seconds, restarts)
            probe = JobProbe(secret) if where.is_elastic else None
            stack.enter_context(_serving_node_0(listener, secret, options, probe))
            if nodes.most > 1:
                _announce_node_0(screen, nodes, str(place), secret if is_new else None)
        kind = (
            ElasticCoordinatorConnection if where.is_elastic else CoordinatorConnection
        )
        connection = kind(
            screen,
            address=address,
            secret=secret,
            hello=hello,
            join_seconds=where.join_seconds,
            place=str(place),
        )
        yield stack.enter_context(contextlib.closing(connection))


def _hello_of(nodes: NodeRange, rank: int | None, settings: RunSettings) -> Hello:
    """Return the `Hello` by which this node joins the job at node 0.

    Args:
        nodes: `NodeRange`, number of nodes of the job.
        rank: Int, rank of this node, or `None` if node 0 chooses it.
        settings: `RunSettings` of this node.
    """
    return Hello(
        version=tfdp.__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        nodes=nodes.most,
        min_nodes=nodes.least,
        num_workers=settings.num_workers,
        program=os.path.basename(settings.script),
        rebalance=settings.rebalance,
        host=socket.gethostname(),
        node_rank=rank,
        grace_seconds=settings.grace,
    )


@contextlib.contextmanager
def _serving_node_0(
    listener: socket.socket,
    secret: str,
    options: tuple[Hello, float, Callable[[int], Restarts]],
    probe: JobProbe | None,
) -> Iterator[None]:
    """Run the server of node 0 in a thread until the context ends.

    Args:
        listener: Listening socket at the rendezvous.
        secret: String, the job's secret.
        options: Tuple of the first arguments of `Coordinator`: `node_0`,
            `join_seconds` and `make_restarts`.
        probe: `JobProbe` for the `ElasticCoordinator` of an elastic job, closed at the
            end; or `None` for a `Coordinator`.
    """
    with contextlib.ExitStack() as stack:
        if probe is None:
            coordinator = Coordinator(*options)
        else:
            stack.enter_context(contextlib.closing(probe))
            coordinator = ElasticCoordinator(*options, probe)
        server = Server(listener, secret, coordinator)
        stack.enter_context(contextlib.closing(server))
        yield


def _announce_node_0(
    screen: Screen, nodes: NodeRange, place: str, secret: str | None
) -> None:
    """Print which nodes node 0 waits for, and how users give them a new secret.

    Args:
        screen: `Screen` for the messages.
        nodes: `NodeRange`, number of nodes of the job.
        place: String, address of the rendezvous.
        secret: String, the generated secret, or `None` if the user has given one.
    """
    if secret is not None:
        others = "the other node" if nodes.most == 2 else "each of the other nodes"
        screen.message(
            f"tfdp: on {others} paste this line, which gives it the secret of this "
            f"job, and then the same `tfdp run`:\n{line_to_paste(secret)}"
        )
    text = f"waits at {place} for {pluralize(nodes.most - 1, 'more node')}"
    if nodes.least is not None:
        text += f", and starts with {nodes.least} in all"
    screen.message(f"tfdp: this is node 0; it {text}")
