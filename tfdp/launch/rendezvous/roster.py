"""Roster of a job: descriptions, ranks, addresses and failure reports of its nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp.communication.cluster.address import is_local_name
from tfdp.communication.cluster.tf_config import shorten
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import Failure, MalformedMessage, from_message
from tfdp.launch.rendezvous.link import HeartbeatConnection

# The numbers in a `Hello` come from another machine, so a `Hello` with more nodes, or
# more workers, than this is rejected as malformed.
_MAX_OF_NODE = 1 << 16
# Heartbeats come each second, so a node that is silent for longer than this many
# seconds may be lost.
DOUBTFUL_SECONDS = 3.5
# The addresses of all workers are sent in one message of limited size, so a job has at
# most this many workers.
_MAX_WORKERS = 8192
# A sentence with hundreds of names is hard to read, so it names at most this many
# nodes, and counts the others.
_MAX_NAMES = 8

# Nodes that differ in one of these fields of `Hello` cannot run one job. The
# placeholders of the sentences are node 0's value, the name of the host that differs,
# and its value.
_SAME_ON_ALL = {
    "version": "Node 0 has tfdp {0}, {1} has tfdp {2}. Install the same version on all "
    "machines.",
    "python": "Node 0 has Python {0}, {1} has Python {2}. Use the same version on all "
    "machines.",
    "nodes_option": "Node 0 was started with --nodes {0}, {1} with --nodes {2}. Give "
    "both the same.",
    "program": "Node 0 runs {0}, {1} runs {2}. Give all machines the same script.",
}


@dataclasses.dataclass(frozen=True)
class Hello:
    """First message of a node, which describes it.

    Args:
        version: String, the node's version of tfdp.
        python: String, the node's version of Python, such as `"3.11"`.
        nodes: Int, number of nodes that the node's command line asks for, the maximum
            if `min_nodes` is set.
        num_workers: Int, number of workers that the node will start.
        program: String, name of the script or module.
        rebalance: Bool, whether batch rows are rebalanced by the workers' speed.
        host: String, name of the node's machine.
        node_rank: Int, the rank that the node requests, or `None` for any free one.
            Defaults to `None`.
        grace_seconds: Float, seconds that the node's workers have to exit after they
            are asked to. Defaults to `5.0`.
        min_nodes: Int, number of nodes with which the job starts and continues, or
            `None`, the default, if it needs all.
        attempt: Int, the attempt in which workers of this node train after the loss of
            node 0; or 0, the default, if none do.
        attempt_id: String, id of that attempt. Defaults to `""`.
        ports: List of ints, the ports of these workers. Defaults to none.
    """

    version: str
    python: str
    nodes: int
    num_workers: int
    program: str
    rebalance: bool
    host: str
    node_rank: int | None = None
    grace_seconds: float = 5.0
    min_nodes: int | None = None
    attempt: int = 0
    attempt_id: str = ""
    ports: list[int] = dataclasses.field(default_factory=list)

    @property
    def nodes_option(self) -> str:
        """String, the value of the node's option `--nodes`, such as `"1:4"`."""
        least = "" if self.min_nodes is None else f"{self.min_nodes}:"
        return f"{least}{self.nodes}"

    def to_message(self) -> dict[str, Any]:
        """Return the message that sends this description to node 0."""
        return {"type": "hello", **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Hello:
        """Parse the first message of another node.

        Args:
            message: Mapping, the unchecked message.

        Returns:
            `Hello`.

        Raises:
            MalformedMessage: If a field is missing or has another type.
        """
        hello = from_message(cls, message)
        counts = (hello.nodes, hello.num_workers, (hello.node_rank or 0) + 1)
        is_valid = (
            message.get("type") == "hello"
            and all(1 <= count <= _MAX_OF_NODE for count in counts)
            and hello.grace_seconds >= 0
        )
        if not is_valid:
            raise MalformedMessage
        return hello

    def mismatch(self, first: Hello) -> str | None:
        """Name the first setting that must match node 0's but differs from it.

        Args:
            first: `Hello` of node 0.

        Returns:
            String, one sentence, or `None` if all settings match.

        Example:

        >>> one = Hello("1.0", "3.11", 2, 4, "train.py", False, "a")
        >>> one.mismatch(one) is None
        True
        >>> dataclasses.replace(one, nodes=3).mismatch(one)
        'Node 0 was started with --nodes 2, a with --nodes 3. Give both the same.'
        """
        host = shorten(self.host)
        for name, sentence in _SAME_ON_ALL.items():
            value, own = getattr(first, name), getattr(self, name)
            if own != value:
                return sentence.format(value, host, shorten(str(own)))
        if self.min_nodes is not None and self.num_workers != first.num_workers:
            return (
                f"Node 0 was started with -n {first.num_workers}, {host} with "
                f"-n {self.num_workers}. With --nodes MIN:MAX give both the same."
            )
        if self.rebalance != first.rebalance:
            who = "node 0" if first.rebalance else host
            return f"Only {who} has --rebalance. Give it to all machines, or to none."
        return None

    def rank_out_of_range(self) -> str | None:
        """Return the error text if the requested rank is out of range, or `None`."""
        if self.node_rank is None or 0 <= self.node_rank < self.nodes:
            return None
        return (
            f"--node-rank must be from 0 to {self.nodes - 1}, since there "
            f"{'is' if self.nodes == 1 else 'are'} {pluralize(self.nodes, 'node')}. "
            f"Received: --node-rank {self.node_rank}"
        )


@dataclasses.dataclass(eq=False)
class Node:
    """A node whose launcher is connected to node 0, with its state in the job.

    Args:
        link: `HeartbeatConnection` to the node.
        hello: `Hello` of the node.
        rank: Int, rank of the node, or `None` until one is assigned.
        ports: List of ints, ports of its workers in this attempt, or `None` until they
            are reported. Defaults to `None`.
        is_done: Bool, whether its workers have ended without a failure. Defaults to
            `False`.
        has_stopped: Bool, whether none of its workers runs. Defaults to `True`.
        ports_attempt: Int, the attempt in which it was last asked for ports. Defaults
            to 0.
        has_started: Bool, whether it has started workers in this attempt. Defaults to
            `False`.
        is_leaving: Bool, whether it leaves a job that continues. Defaults to `False`.
    """

    link: HeartbeatConnection
    hello: Hello
    rank: int | None
    ports: list[int] | None = None
    is_done: bool = False
    has_stopped: bool = True
    ports_attempt: int = 0
    has_started: bool = False
    is_leaving: bool = False

    def __str__(self) -> str:
        """Return the name for messages, such as "node 1 (host, 10.0.0.2)"."""
        name = "a node" if self.rank is None else f"node {self.rank}"
        return f"{name} ({shorten(self.hello.host)}, {self.link.peer})"


class Roster:
    """Connected nodes of a job, with the ranks of all nodes.

    Args:
        node_0: `Hello` of node 0.

    Attributes:
        nodes: List of `Node`, the connected nodes; sorted by rank once ranks are
            assigned.
        has_assigned_ranks: Bool, whether all ranks are assigned. A node that joins
            later is one that was lost and comes back, or a new one.
        least: Int, number of nodes that the job needs.
    """

    def __init__(self, node_0: Hello) -> None:
        self.nodes: list[Node] = []
        self.has_assigned_ranks = False
        self._node_0, self._num_nodes = node_0, node_0.nodes
        self._is_elastic = node_0.min_nodes is not None
        self.least = node_0.min_nodes or node_0.nodes
        # Number of workers and name of each node, by rank. The entries of a lost node
        # are kept, so the ranks of workers do not change and messages can name the
        # node.
        self._sizes: list[int] = []
        self._names: list[str] = []

    @property
    def is_complete(self) -> bool:
        """Bool, whether the job has its largest number of nodes, all connected."""
        return len(self.nodes) == self._num_nodes

    @property
    def num_workers(self) -> int:
        """Int, number of workers of all nodes with a rank, also of lost ones."""
        return sum(self._sizes)

    def why_refused(self, hello: Hello) -> str | None:
        """Return why a node cannot join the job, or `None` if it can.

        Args:
            hello: `Hello` of the node.
        """
        if sentence := hello.mismatch(self._node_0) or hello.rank_out_of_range():
            return sentence
        host = shorten(hello.host)
        holder = None if hello.node_rank is None else self.node_at_rank(hello.node_rank)
        if holder is not None:
            return (
                "Two nodes have the same rank. Give each machine its own --node-rank, "
                f"or remove it. Received: --node-rank {hello.node_rank} from "
                f"{host}, which is that of {holder}"
            )
        if self.is_complete:
            return (
                f"The job has all of its {pluralize(self._num_nodes, 'node')} already: "
                f"{self.describe_connected()}. Give another port with "
                f"--rendezvous for another job. Received: one more node, {host}"
            )
        if self.has_assigned_ranks and not self._is_elastic:
            return self._why_wrong_size(hello)
        total = sum(n.hello.num_workers for n in self.nodes) + hello.num_workers
        if total > _MAX_WORKERS:
            return (
                "The nodes of a job must have at most "
                f"{pluralize(_MAX_WORKERS, 'worker')} in all. Received: "
                f"-n {hello.num_workers} from {host}, {total:,} in all"
            )
        return None

    def add(self, link: HeartbeatConnection, hello: Hello) -> Node:
        """Add a node that `why_refused` does not refuse.

        Args:
            link: `HeartbeatConnection` to the node.
            hello: `Hello` of the node.

        Returns:
            `Node`.
        """
        node = Node(link, hello, rank := self._rank_of(hello))
        self.nodes.append(node)
        if self.has_assigned_ranks and rank is not None:
            self._sizes[rank : rank + 1] = [hello.num_workers]
            self._names[rank : rank + 1] = [str(node)]
        return node

    def assign_ranks(self) -> None:
        """Assign all ranks: as requested, or else in the order of joining."""
        for node in self.nodes:
            if node.rank is None:
                node.rank = self.free_ranks()[0]
        self.nodes.sort(key=lambda node: node.rank or 0)
        self._sizes = [node.hello.num_workers for node in self.nodes]
        self._names = [str(node) for node in self.nodes]
        self.has_assigned_ranks = True

    def restore(self) -> None:
        """Prepare the roster of a new node 0 for nodes that return with their ranks.

        Each rank gets node 0's number of workers, and the name "a lost node". Connected
        nodes keep only ranks that they requested.
        """
        self._sizes = [self._node_0.num_workers] * self._num_nodes
        self._names = ["a lost node"] * self._num_nodes
        self.revoke_ranks()

    def revoke_ranks(self) -> None:
        """Revoke the assigned ranks; each node keeps only a rank that it requested."""
        self.has_assigned_ranks = False
        for node in self.nodes:
            node.rank = node.hello.node_rank

    def node_at_rank(self, rank: int) -> Node | None:
        """Return the connected node of a rank, or `None` if there is none."""
        return next((node for node in self.nodes if node.rank == rank), None)

    def node_of_link(self, link: HeartbeatConnection) -> Node | None:
        """Return the node of a connection, or `None` if it is not in the roster."""
        return next((node for node in self.nodes if node.link is link), None)

    def free_ranks(self) -> list[int]:
        """List the ranks that no connected node has."""
        taken = {node.rank for node in self.nodes}
        return [rank for rank in range(self._num_nodes) if rank not in taken]

    def first_rank(self, node: Node) -> int:
        """Return the rank of a node's first worker in the whole job."""
        return sum(self._sizes[: node.rank])

    def has_worker(self, node: Node, worker: int) -> bool:
        """Return whether a worker, by its rank in the whole job, belongs to a node."""
        first = self.first_rank(node)
        return first <= worker < first + node.hello.num_workers

    def node_name(self, worker: int) -> str:
        """Return the name of a worker's node, whether or not it is connected.

        Args:
            worker: Int, rank of the worker in the whole job.

        Returns:
            String such as `"node 1 (host, 10.0.0.2)"`, or `"no node"`.
        """
        for node_rank, name in enumerate(self._names):
            first = sum(self._sizes[:node_rank])
            if first <= worker < first + self._sizes[node_rank]:
                return name
        return "no node"

    def silent_seconds(self, worker: int) -> float | None:
        """Return how long a worker's node has been silent.

        Args:
            worker: Int, rank of the worker in the whole job.

        Returns:
            Float, seconds; `None` if below `DOUBTFUL_SECONDS`, or if the node is lost.
        """
        for node in self.nodes:
            silent = node.link.silent_seconds
            if self.has_worker(node, worker) and silent > DOUBTFUL_SECONDS:
                return silent
        return None

    def describe_missing(self) -> str:
        """Describe the missing nodes for a message, such as "2 more nodes"."""
        if self.has_assigned_ranks and not self._is_elastic:
            names = [self._names[rank] for rank in self.free_ranks()]
            return f"{_join_names(names)} to come back"
        return pluralize(self.least - len(self.nodes), "more node")

    def describe_connected(self) -> str:
        """List the names of the connected nodes, for messages to the user."""
        return _join_names([str(node) for node in self.nodes])

    def hosts(self) -> list[str]:
        """List the IP addresses at which other nodes reach each of `nodes`, in order.

        A node on the machine of node 0 may be connected by the loopback, which no other
        machine can use: its address is that of node 0.
        """
        seen = [node.link.local for node in self.nodes]
        public = next((host for host in seen if not is_local_name(host)), seen[0])
        peers = [node.link.peer for node in self.nodes]
        return [public if is_local_name(peer) else peer for peer in peers]

    def _rank_of(self, hello: Hello) -> int | None:
        """Return the rank of a joining node, or `None` if it is assigned later.

        It is the rank that the node requests, or, once all ranks are assigned, the
        lowest that no connected node has.
        """
        if hello.node_rank is not None or not self.has_assigned_ranks:
            return hello.node_rank
        return self.free_ranks()[0]

    def _why_wrong_size(self, hello: Hello) -> str | None:
        """Return the error if a returning node has more or fewer workers, or `None`."""
        before = self._sizes[self._rank_of(hello) or 0]
        if before == hello.num_workers:
            return None
        return (
            f"This node had {pluralize(before, 'worker')} and comes back with "
            f"{pluralize(hello.num_workers, 'worker')}. Give the same -n as before. "
            f"Received: -n {hello.num_workers}"
        )


def _join_names(names: Sequence[str]) -> str:
    """Join the first 8 names and the number of the rest, such as "a, b, 3 more"."""
    more = len(names) - _MAX_NAMES
    rest = [f"{more:,} more"] if more > 0 else []
    return ", ".join([*names[:_MAX_NAMES], *rest])


class Reports:
    """Failures that the nodes report in one attempt.

    Args:
        roster: `Roster` of the job.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._failures: list[Failure] = []

    def add(self, failure: Failure) -> bool:
        """Add the report of a failed worker.

        Args:
            failure: `Failure` of a worker.

        Returns:
            Bool, whether the cause is known. It is not while the worker that `failure`
            reports as lost may still be reported by its own node.
        """
        self._failures.append(failure)
        known = {each.rank for each in self._failures}
        return failure.lost_rank is None or failure.lost_rank in known

    def cause(self) -> Failure:
        """Return the failure that caused the others.

        The search begins at the first report. While a failure names a worker as lost,
        and a failure of that worker was also reported, the search continues with it.
        """
        by_rank = {failure.rank: failure for failure in reversed(self._failures)}
        cause = self._failures[0]
        seen = {cause.rank}
        while cause.lost_rank in by_rank and cause.lost_rank not in seen:
            cause = by_rank[cause.lost_rank]
            seen.add(cause.rank)
        return cause

    def sentence(self) -> str:
        """Describe the cause: the worker, its node, its reason and its log."""
        cause = self.cause()
        log = ""
        if cause.log:
            log = f". Full output of worker {cause.rank}, there: {shorten(cause.log)}"
        return (
            f"worker {cause.rank} on {self._roster.node_name(cause.rank)} "
            f"{shorten(cause.reason)}{self._because(cause)}; the workers of all nodes "
            f"were stopped{log}"
        )

    def _because(self, cause: Failure) -> str:
        """Return the clause about the worker that `cause` names as lost.

        An example is " since worker 3 on node 1 (host, 10.0.0.2) was lost".

        Returns:
            String, `""` if `cause` names no other worker.
        """
        lost = cause.lost_rank
        if lost is None or lost == cause.rank:
            return ""
        silent = self._roster.silent_seconds(lost)
        said = "" if silent is None else f", which has not answered for {silent:.0f} s"
        return f" since worker {lost} on {self._roster.node_name(lost)} was lost{said}"
