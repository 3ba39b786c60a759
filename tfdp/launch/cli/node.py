"""`tfdp run` on one of several machines: rendezvous, then the workers of this one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import platform
import socket
from collections.abc import Callable, Iterator

import tfdp
from tfdp.ground.text import pluralize
from tfdp.launch.cli.launch import RunSettings
from tfdp.launch.cli.node_options import NodeOptions, RendezvousAddress
from tfdp.launch.rendezvous.address import listen, own_address, resolve
from tfdp.launch.rendezvous.coordinator import Coordinator
from tfdp.launch.rendezvous.failure import RendezvousError
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


@dataclasses.dataclass(frozen=True)
class JobSecret:
    """Secret of a job that was given by another way than a file.

    Args:
        text: String.
    """

    text: str


def make_hello(where: NodeOptions, settings: RunSettings) -> Hello:
    """Return what this node says of itself.

    Args:
        where: `NodeOptions`.
        settings: `RunSettings`.
    """
    assert where.nodes is not None
    return Hello(
        version=tfdp.__version__,
        python=".".join(platform.python_version_tuple()[:2]),
        nodes=where.nodes,
        num_workers=settings.num_workers,
        program=os.path.basename(settings.script),
        rebalance=settings.rebalance,
        host=socket.gethostname(),
        node_rank=where.node_rank,
        grace_seconds=settings.grace,
    )


@contextlib.contextmanager
def membership(
    where: NodeOptions,
    hello: Hello,
    max_restarts: int,
    secret: JobSecret | None,
    say: Callable[[str], None],
) -> Iterator[Member]:
    """Be node 0, if the rendezvous is here, and a member of the job in any case.

    Args:
        where: `NodeOptions`, of which `rendezvous` is one.
        hello: `Hello` of this node.
        max_restarts: Int, that node 0 allows.
        secret: `JobSecret`, or `None` to read the file or to make one.
        say: Function that shows a sentence.

    Yields:
        `Member`.

    Raises:
        RendezvousError: If node 0 cannot listen, or there is no secret.
    """
    place = where.rendezvous
    assert place is not None
    text = read_secret() if secret is None else secret.text
    listener, address = None, (place.host, place.port)
    if where.node_rank in (None, 0):
        listener = listen(*place, is_node_0=where.node_rank == 0)
    with contextlib.ExitStack() as stack:
        if listener is None:
            resolve(*place)  # an unknown name is told at once
            if text is None:
                raise RendezvousError(_no_secret(place))
            say(f"this node joins {place}")
        else:
            if text is None:
                text = new_secret()
                if hello.nodes > 1:
                    _ask_to_paste(text, hello.nodes, say)
            hello = dataclasses.replace(hello, node_rank=0)
            address = own_address(listener)
            # No worker is left out: each node has those that it was started with.
            restarts = functools.partial(Restarts, max_restarts=max_restarts)
            coordinator = Coordinator(hello, where.join_seconds, restarts)
            stack.enter_context(contextlib.closing(Server(listener, text, coordinator)))
            if hello.nodes > 1:
                say(
                    f"this is node 0; it waits at {place} for "
                    f"{pluralize(hello.nodes - 1, 'more node')}"
                )
        member = Member(address, text, hello, where.join_seconds, str(place))
        yield stack.enter_context(contextlib.closing(member))


def _ask_to_paste(secret: str, nodes: int, say: Callable[[str], None]) -> None:
    others = "the other node" if nodes == 2 else "each of the other nodes"
    say(
        f"on {others} paste this line, which gives it the secret of this job, and then "
        f"the same `tfdp run`:\n{line_to_paste(secret)}"
    )


def _no_secret(place: RendezvousAddress) -> str:
    return (
        f"This machine is not node 0 of {place}, and has no secret to show there: "
        "paste the line that node 0 prints, or give all nodes a file with the same "
        f"secret. Received: no {VARIABLE}"
    )


def announcement(
    node_rank: int,
    nodes: int,
    first_rank: int,
    num_local: int,
    num_workers: int,
    folder: pathlib.Path,
) -> str:
    """Return the sentence about what this node starts.

    Args:
        node_rank: Int, this node's.
        nodes: Int, number of nodes.
        first_rank: Int, rank of its first worker.
        num_local: Int, its workers.
        num_workers: Int, all workers.
        folder: Path of its logs.

    Returns:
        String.

    Example:

    >>> announcement(1, 2, 4, 4, 8, pathlib.Path("logs"))
    'node 1 of 2 starts workers 4 to 7 of 8; logs in logs'
    """
    last = first_rank + num_local - 1
    which = f"worker {first_rank}"
    if num_local > 1:
        which = f"workers {first_rank} to {last}"
    return (
        f"node {node_rank} of {nodes} starts {which} of {num_workers}; logs in {folder}"
    )
