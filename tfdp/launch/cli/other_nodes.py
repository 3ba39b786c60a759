"""The other nodes of a job: how this one joins them, and what they say."""

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
from tfdp.ground.text import pluralize
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.node_options import NodeOptions
from tfdp.launch.cli.screen import Screen
from tfdp.launch.cli.worker import Worker
from tfdp.launch.rendezvous.address import listen, own_address, resolve
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import NODE_LOST, RendezvousError
from tfdp.launch.rendezvous.member import Member
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import Hello
from tfdp.launch.rendezvous.secret import (
    VARIABLE,
    line_to_paste,
    new_secret,
    read_secret,
)
from tfdp.launch.rendezvous.server import Server


class OtherNodes(Member):
    """Other nodes of a job: what they say, and what this one tells them.

    Args:
        screen: The `Screen` for what they say.
        **connection: Arguments of `Member`.

    Attributes:
        attempt: Int, the number of the attempt that runs, or 0.
        has_left: Bool, whether this node has told that it was told to end.
    """

    def __init__(self, screen: Screen, **connection: Any) -> None:
        super().__init__(**connection)
        self.attempt = 0
        self.has_left = False
        self._screen = screen
        self._put_back: dict[str, Any] | None = None

    def take(self) -> dict[str, Any] | None:
        """Take the next message that somebody has to act on, or return `None`."""
        message, self._put_back = self._put_back, None
        while message is None and (message := super().take()) is not None:
            if message.get("type") == "notice":
                self._screen.message(f"tfdp: {message.get('text')}")
                message = None
        return message

    def order(self) -> tuple[int, int] | None:
        """Return exit code and signal of the order to stop that has come, or `None`.

        The message itself stays for who looks after the attempts.
        """
        message = self.take()
        if message is None:
            return None
        if message.get("type") == "stop" and message.get("attempt") != self.attempt:
            return None
        self._put_back = message
        code = message.get("code")
        signum = message.get("signal", signal.SIGTERM)
        return code if isinstance(code, int) else NODE_LOST, signum

    def tell_failure(self, failed: Worker, cause: Worker) -> None:
        """Tell which worker has failed here.

        Args:
            failed: `Worker` that was seen to fail first.
            cause: `Worker` of this node that it says was lost, or the same one.
        """
        for worker in [cause, failed] if cause is not failed else [failed]:
            if worker.exit_code:
                self.send(worker.failure.to_message(self.attempt))

    def tell(self, kind: str, **message: Any) -> None:
        """Tell node 0 something about this attempt.

        Args:
            kind: String, the type of the message.
            **message: What belongs to it.
        """
        self.send({"attempt": self.attempt, "type": kind, **message})

    def tell_end(self, code: int, *, has_saved: bool) -> None:
        """Tell that no worker of this node runs any more.

        Args:
            code: Int, the exit code; 0 if all workers are done.
            has_saved: Bool, whether training was saved because of a signal.
        """
        self.tell("stopped" if code else "done", code=code, has_saved=has_saved)

    def leave(self, why: str, code: int, signum: int) -> None:
        """Tell that this node was told to end.

        Args:
            why: String, such as `"SIGINT received"`.
            code: Int, the exit code of all.
            signum: Int, the signal that the workers get.
        """
        self.has_left = True
        self.tell("leaving", why=why, code=code, signal=int(signum))


@contextlib.contextmanager
def joined(
    where: NodeOptions, settings: RunSettings, secret: str | None, screen: Screen
) -> Iterator[OtherNodes]:
    """Be node 0, if the rendezvous is here, and a member of the job in any case.

    Args:
        where: `NodeOptions`, of which `nodes` and `rendezvous` are two.
        settings: `RunSettings`.
        secret: String, or `None` to read the file or to make one.
        screen: `Screen`.

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
            resolve(*place)  # an unknown name is told at once
            if secret is None:
                raise RendezvousError(
                    f"This machine is not node 0 of {place}, and has no secret to show "
                    "there: paste the line that node 0 prints, or give all nodes a "
                    f"file with the same secret. Received: no {VARIABLE}"
                )
            screen.message(f"tfdp: this node joins {place}")
        else:
            is_new, secret = secret is None, secret or new_secret()
            hello = dataclasses.replace(hello, node_rank=0)
            address = own_address(listener)
            # No worker is left out: each node has those that it was started with.
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
    """Say what is awaited here, and how the others get a secret that is new."""
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
