"""Roster of a job: the nodes that are there, their ranks, workers and addresses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tfdp.communication.cluster.tf_config import shorten
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.address import is_loopback
from tfdp.launch.rendezvous.hello import Hello

# Who was heard of more recently is there.
DOUBTFUL_SECONDS = 3.5
# The addresses of all of them go into one message.
_MOST_WORKERS = 8192
_MOST_NAMES = 8


class Link(Protocol):
    """Connection to a node."""

    @property
    def peer(self) -> str:
        """String, the IP address of the node."""

    @property
    def local(self) -> str:
        """String, the IP address at which it has reached node 0."""

    @property
    def silent_seconds(self) -> float:
        """Float, seconds since something was heard of it."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message."""


@dataclasses.dataclass(eq=False)
class Node:
    """A node that is there.

    Args:
        link: `Link` to it.
        hello: `Hello`, what it says of itself.
        rank: Int, or `None` while any is free for it.
        ports: List of ints, of its workers in this attempt, or `None`.
        is_done: Bool, whether its workers have ended without a failure.
        has_stopped: Bool, whether none of its workers runs.
    """

    link: Link
    hello: Hello
    rank: int | None
    ports: list[int] | None = None
    is_done: bool = False
    has_stopped: bool = True

    def __str__(self) -> str:
        name = "a node" if self.rank is None else f"node {self.rank}"
        return f"{name} ({shorten(self.hello.host)}, {self.link.peer})"


class Roster:
    """Nodes of a job.

    Args:
        own: `Hello` of node 0.

    Attributes:
        nodes: List of `Node`, those that are there, in the order of ranks once all
            were.
        is_settled: Bool, whether every rank has been given. A node that comes later is
            one of these that comes back.
    """

    def __init__(self, own: Hello) -> None:
        self.nodes: list[Node] = []
        self.is_settled = False
        self._own = own
        # By rank; they stay when a node goes.
        self._sizes: list[int] = []
        self._names: list[str] = []

    @property
    def is_complete(self) -> bool:
        """Bool, whether all nodes are there."""
        return len(self.nodes) == self._own.nodes

    @property
    def num_workers(self) -> int:
        """Int, workers of all nodes."""
        return sum(self._sizes)

    def objection(self, hello: Hello) -> str | None:
        """Say why a node cannot be one of the job's, or return `None`.

        Args:
            hello: `Hello` of the node.
        """
        if sentence := hello.difference(self._own) or hello.rank_out_of_range():
            return sentence
        host = shorten(hello.host)
        holder = None if hello.node_rank is None else self.at(hello.node_rank)
        if holder is not None:
            return (
                "Two nodes have the same rank. Give each machine its own --node-rank, "
                f"or leave it out. Received: --node-rank {hello.node_rank} from "
                f"{host}, which is that of {holder}"
            )
        if self.is_complete:
            return (
                f"The job has all of its {pluralize(self._own.nodes, 'node')} already: "
                f"{self.here()}. Give another port with "
                f"--rendezvous for another job. Received: one more node, {host}"
            )
        if self.is_settled:
            return self._other_size(hello)
        total = sum(n.hello.num_workers for n in self.nodes) + hello.num_workers
        if total > _MOST_WORKERS:
            return (
                "The nodes of a job must have at most "
                f"{pluralize(_MOST_WORKERS, 'worker')} in all. Received: "
                f"-n {hello.num_workers} from {host}, {total:,} in all"
            )
        return None

    def add(self, link: Link, hello: Hello) -> Node:
        """Take a node in, to which nothing is objected.

        Args:
            link: `Link` to it.
            hello: `Hello`.

        Returns:
            `Node`.
        """
        node = Node(link, hello, self._rank_of(hello))
        self.nodes.append(node)
        return node

    def settle(self) -> None:
        """Give every node its rank, those without a wish in the order they came."""
        for node in self.nodes:
            if node.rank is None:
                node.rank = self.free_ranks()[0]
        self.nodes.sort(key=lambda node: node.rank or 0)
        self._sizes = [node.hello.num_workers for node in self.nodes]
        self._names = [str(node) for node in self.nodes]
        self.is_settled = True

    def unsettle(self) -> None:
        """Forget the ranks that were given: no worker has started with them."""
        self.is_settled = False
        for node in self.nodes:
            node.rank = node.hello.node_rank

    def at(self, rank: int) -> Node | None:
        """Return the node that has a rank, or `None`."""
        return next((node for node in self.nodes if node.rank == rank), None)

    def of(self, link: Link) -> Node | None:
        """Return the node at the end of a link, or `None`."""
        return next((node for node in self.nodes if node.link is link), None)

    def free_ranks(self) -> list[int]:
        """List the ranks that no node has that is there."""
        taken = {node.rank for node in self.nodes}
        return [rank for rank in range(self._own.nodes) if rank not in taken]

    def first_rank(self, node: Node) -> int:
        """Return the rank of a node's first worker."""
        return sum(self._sizes[: node.rank])

    def has(self, node: Node, worker: int) -> bool:
        """Return whether a worker is one of a node's."""
        first = self.first_rank(node)
        return first <= worker < first + node.hello.num_workers

    def place(self, worker: int) -> str:
        """Name the node of a worker, also one that has gone."""
        for node_rank, name in enumerate(self._names):
            first = sum(self._sizes[:node_rank])
            if first <= worker < first + self._sizes[node_rank]:
                return name
        return "no node"

    def silent_seconds(self, worker: int) -> float | None:
        """Return for how long the node of a worker has been silent, if it is long."""
        for node in self.nodes:
            silent = node.link.silent_seconds
            if self.has(node, worker) and silent > DOUBTFUL_SECONDS:
                return silent
        return None

    def missing(self) -> str:
        """Say who is missing."""
        if self.is_settled:
            names = [self._names[rank] for rank in self.free_ranks()]
            return f"{_listed(names)} to come back"
        return pluralize(self._own.nodes - len(self.nodes), "more node")

    def here(self) -> str:
        """Name who is there."""
        return _listed([str(node) for node in self.nodes])

    def hosts(self) -> list[str]:
        """List the IP address of each node, as the others reach it.

        A node on the machine of node 0 may have come by the loopback, which no other
        machine can use: it has the address of node 0.
        """
        seen = [node.link.local for node in self.nodes]
        public = next((host for host in seen if not is_loopback(host)), seen[0])
        peers = [node.link.peer for node in self.nodes]
        return [public if is_loopback(peer) else peer for peer in peers]

    def _rank_of(self, hello: Hello) -> int | None:
        """Return the rank of a node, if it is known before all are there."""
        if hello.node_rank is not None or not self.is_settled:
            return hello.node_rank
        return self.free_ranks()[0]

    def _other_size(self, hello: Hello) -> str | None:
        before = self._sizes[self._rank_of(hello) or 0]
        if before == hello.num_workers:
            return None
        return (
            f"This node had {pluralize(before, 'worker')} and comes back with "
            f"{pluralize(hello.num_workers, 'worker')}. Give the same -n as before. "
            f"Received: -n {hello.num_workers}"
        )


def _listed(names: Sequence[str]) -> str:
    """List names, of many only the first ones: the sentence goes to all nodes."""
    more = len(names) - _MOST_NAMES
    rest = [f"{more:,} more"] if more > 0 else []
    return ", ".join([*names[:_MOST_NAMES], *rest])
