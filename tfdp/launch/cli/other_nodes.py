"""The connection of a launcher to the other nodes of its job."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import signal
import socket
from collections.abc import Iterator
from typing import Any

import tfdp
from tfdp.communication.connection.secret import (
    VARIABLE,
    derive_secret,
    line_to_paste,
    new_secret,
    read_secret,
)
from tfdp.ground.text import pluralize
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.node_options import NodeOptions
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.worker import Worker
from tfdp.launch.rendezvous.address import check_resolves, listen, own_address
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import NODE_LOST, RendezvousError
from tfdp.launch.rendezvous.member import Member
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import Hello
from tfdp.launch.rendezvous.server import Server


class OtherNodes(Member):
    """Connection of this node to node 0, with the messages of a running job.

    Args:
        screen: `Screen` that shows notices of node 0.
        secret: String, the job's secret.
        **connection: Further arguments of `Member`.

    Attributes:
        worker_secret: String, the secret of the job's workers.
        attempt: Int, number of the running attempt, or 0 before the first.
        has_left: Bool, whether this node has left the job because of a signal or a
            timeout.
    """

    def __init__(self, screen: Screen, secret: str, **connection: Any) -> None:
        super().__init__(secret=secret, **connection)
        self.worker_secret = derive_secret(secret, "workers")
        self.attempt = 0
        self.has_left = False
        self._screen = screen
        self._peeked: dict[str, Any] | None = None

    def take(self) -> dict[str, Any] | None:
        """Return and remove the next message but notices, or `None` if there is none.

        Notices are printed on the screen.
        """
        message, self._peeked = self._peeked, None
        while message is None and (message := super().take()) is not None:
            if message.get("type") == "notice":
                self._screen.message(f"tfdp: {message.get('text')}")
                message = None
        return message

    def stop_order(self) -> tuple[int, int] | None:
        """Return the exit code and the signal of an order to stop, or `None`.

        The message stays in the queue, since `NodeAttempts` handles it after the job
        has ended.
        """
        message = self.take()
        if message is None:
            return None
        if message.get("type") == "stop" and message.get("attempt") != self.attempt:
            return None
        self._peeked = message
        code = message.get("code")
        signum = message.get("signal", signal.SIGTERM)
        return code if isinstance(code, int) else NODE_LOST, signum

    def report_failure(self, failed: Worker, cause: Worker) -> None:
        """Report a failed worker of this node to node 0.

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

    def leave(self, why: str, code: int, signum: int) -> None:
        """Report to node 0 that this node leaves the job, which ends it for all.

        Args:
            why: String, the reason, such as `"SIGINT received"`.
            code: Int, exit code of all nodes.
            signum: Int, signal that the workers of all nodes receive.
        """
        self.has_left = True
        self.report("leaving", why=why, code=code, signal=int(signum))


@contextlib.contextmanager
def join_nodes(
    where: NodeOptions, settings: RunSettings, secret: str | None, screen: Screen
) -> Iterator[OtherNodes]:
    """Join the job as a node, and run node 0's server if the rendezvous is here.

    Args:
        where: `NodeOptions` with `nodes` and `rendezvous`.
        settings: `RunSettings` of this node.
        secret: String, the job's secret, or `None` to read it from the file, or to
            generate one on node 0.
        screen: `Screen` for messages.

    Yields:
        `OtherNodes`.

    Raises:
        RendezvousError: If node 0 cannot listen, or there is no secret.
    """
    nodes, place = where.nodes, where.rendezvous
    assert nodes is not None
    assert place is not None
    hello = Hello(
        version=tfdp.__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        nodes=nodes,
        num_workers=settings.num_workers,
        program=os.path.basename(settings.script),
        rebalance=settings.rebalance,
        host=socket.gethostname(),
        node_rank=where.node_rank,
        grace_seconds=settings.grace,
    )
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
            # `min_workers` is not set: the number of workers of a node is fixed.
            restarts = functools.partial(Restarts, max_restarts=settings.max_restarts)
            coordinator = Coordinator(hello, where.join_seconds, restarts)
            server = Server(listener, secret, coordinator)
            stack.enter_context(contextlib.closing(server))
            if nodes > 1:
                _announce_node_0(screen, nodes, str(place), secret if is_new else None)
        others = OtherNodes(
            screen,
            address=address,
            secret=secret,
            hello=hello,
            join_seconds=where.join_seconds,
            place=str(place),
        )
        yield stack.enter_context(contextlib.closing(others))


def _announce_node_0(
    screen: Screen, nodes: int, place: str, secret: str | None
) -> None:
    """Print which nodes node 0 waits for, and how they get a generated secret.

    Args:
        screen: `Screen` for the messages.
        nodes: Int, number of nodes of the job.
        place: String, address of the rendezvous.
        secret: String, the generated secret, or `None` if the user has given one.
    """
    if secret is not None:
        others = "the other node" if nodes == 2 else "each of the other nodes"
        screen.message(
            f"tfdp: on {others} paste this line, which gives it the secret of this "
            f"job, and then the same `tfdp run`:\n{line_to_paste(secret)}"
        )
    screen.message(
        f"tfdp: this is node 0; it waits at {place} for "
        f"{pluralize(nodes - 1, 'more node')}"
    )
