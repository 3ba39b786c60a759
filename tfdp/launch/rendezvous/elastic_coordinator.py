"""State machine of a job that continues without lost nodes, and admits new ones.

    gathering -> preparing -> running -> ended

It starts when the least number of nodes has joined, and no other has for a short time.
Once its workers train, the loss of a node does not stop the others, and the workers of
a new node join the running ones by themselves. While no worker trains, a failure stops
the workers of all nodes, as in other jobs, and they start again.

After the loss of node 0 the others continue by themselves. If node 0 is started again,
they connect to it again, and it continues their attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdp.communication.cluster.address import join_address
from tfdp.communication.cluster.tf_config import shorten
from tfdp.launch.rendezvous.coordinator import Coordinator, NodeAddresses, Phase
from tfdp.launch.rendezvous.failure import NODE_LOST, Failure, RendezvousError
from tfdp.launch.rendezvous.job_probe import JobProbe
from tfdp.launch.rendezvous.link import HeartbeatConnection
from tfdp.launch.rendezvous.restarts import Restarts
from tfdp.launch.rendezvous.roster import DOUBTFUL_SECONDS, Hello, Node

# Nodes often join within seconds of each other, so a job starts with fewer than the
# maximum only if none has joined for this many seconds.
_GRACE_SECONDS = 5.0
# Workers that train answer every request, so the job counts as no longer training if
# none has answered for this many seconds.
SILENT_SECONDS = 60.0


class ElasticCoordinator(Coordinator):
    """State machine of a job whose nodes may be lost, or join, while it runs.

    Args:
        node_0: `Hello` of node 0, with `min_nodes`.
        join_seconds: Float, longest wait for `min_nodes` nodes.
        make_restarts: Function that maps the number of workers of all nodes to the
            `Restarts` policy of the job.
        probe: `JobProbe`, which asks the workers whether they train.
        clock: Function that returns seconds. Defaults to `time.monotonic`.
    """

    def __init__(
        self,
        node_0: Hello,
        join_seconds: float,
        make_restarts: Callable[[int], Restarts],
        probe: JobProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(node_0, join_seconds, make_restarts, clock)
        self._probe = probe
        self._joined_at = clock()
        # Lost nodes stay in this dict from rank to IP address and worker ports, so the
        # ranks of the other nodes' workers do not change.
        self._by_rank: dict[int, tuple[str, list[int]]] = {}
        # If no node succeeds, the job exits with this code: that of the node that has
        # ended, or was lost, last.
        self._last_code = 0
        # The nodes receive the message `trains` once in each attempt, so the id of the
        # last attempt in which it was sent is kept.
        self._known_id = ""

    @property
    def _trains(self) -> bool:
        """Bool, whether the workers of this attempt have begun to train."""
        return self.phase is Phase.RUNNING and self._probe.seen_at is not None

    def join(self, link: HeartbeatConnection, hello: Hello) -> None:
        """Add a node to the job, in place of a silent one if the job is full.

        Arguments are those of `Coordinator.join`. A node whose workers train in another
        attempt than the present one is refused by a `RendezvousError`.
        """
        nodes = self._roster.nodes
        silent = [n for n in nodes if n.link.silent_seconds > DOUBTFUL_SECONDS]
        if self._roster.is_complete and silent:
            self.register_disconnect(silent[0].link, "does not answer")
        if hello.attempt and not self._has_started:
            self._resume_attempt_of(hello)
        if hello.attempt and (hello.attempt_id, self.phase) != (
            self._id,
            Phase.RUNNING,
        ):
            raise RendezvousError("The job has started again without this node")
        super().join(link, hello)
        self._joined_at = self._clock()
        if self.phase is Phase.PREPARING:
            self._prepare()
        elif hello.attempt:
            node = self._roster.nodes[-1]
            node.has_started, node.has_stopped = True, False
            self._set_place(node, hello.ports)
            self._update_places()

    def _resume_attempt_of(self, hello: Hello) -> None:
        """On a new node 0, continue the attempt in which a reconnected node trains.

        The phase, the number and the id of the attempt change; nothing is sent.

        Args:
            hello: `Hello` of the node, which has the number and the id.
        """
        self.phase, self._has_started = Phase.RUNNING, True
        self._started_at = self._clock()
        self._attempt, self._id = hello.attempt, hello.attempt_id
        # Nodes reconnect only while their workers train, so the present counts as the
        # time of the workers' last answer. Without this time, `_check_silence` would
        # not stop a job whose workers are lost before they answer.
        self._probe.seen_at = self._started_at
        self._roster.restore()
        for node in self._roster.nodes:
            node.ports, node.ports_attempt = None, 0

    def receive(self, link: HeartbeatConnection, message: Mapping[str, Any]) -> None:
        """Handle a message of a node, including the end of its workers.

        A node whose workers have ended with an error is removed from the job; node 0
        only if it is leaving.

        Args:
            link: `HeartbeatConnection` to the node.
            message: Mapping with the type of the message and its content.
        """
        node = self._roster.node_of_link(link)
        super().receive(link, message)
        is_late = message.get("attempt") != self._attempt
        if node is None or is_late or self.phase is not Phase.RUNNING:
            return
        if message.get("type") == "stopped":
            code = message.get("code")
            self._last_code = code if isinstance(code, int) else NODE_LOST
            # Node 0's launcher stays after the end of its workers, since it runs the
            # rendezvous of the other nodes.
            if node.is_leaving or node.rank:
                self._dismiss(node, self._last_code)

    def _advance_gathering(self, clock_seconds: float) -> None:
        """Begin an attempt once all nodes have joined, or enough of them.

        With at least `min_nodes` nodes, it begins once no further node has joined for
        5 s. With fewer nodes after `join_seconds`, the job ends.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        if len(self._roster.nodes) < self._roster.least:
            super()._advance_gathering(clock_seconds)
        elif (
            self._roster.is_complete
            or clock_seconds >= self._joined_at + _GRACE_SECONDS
        ):
            self._prepare()

    def _advance_running(self, clock_seconds: float) -> None:
        """Admit nodes that have joined; end the job when no connected node has workers.

        A node has no workers before it starts them and after it has reported their end.
        While no node is connected, the job continues: node 0 may have been suspended,
        and all nodes reconnect.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        nodes = self._roster.nodes
        if self._decide_at is not None and clock_seconds >= self._decide_at:
            self._decide()
        elif nodes and all(node.has_stopped for node in nodes):
            is_done = any(node.is_done for node in nodes)
            self._end(0 if is_done else self._last_code)
        elif self._trains:
            if self._known_id != self._id:
                self._known_id = self._id
                self._send_all("trains")
            # Nodes that reconnect to a new node 0 keep their ranks, so a node without a
            # rank gets a free one only after they have had some seconds to reconnect.
            is_known = self._roster.has_assigned_ranks
            if not is_known and clock_seconds < self._joined_at + _GRACE_SECONDS:
                return
            for node in nodes:
                if not node.has_started:
                    self._admit(node)
            self._check_silence(clock_seconds)

    def _check_silence(self, clock_seconds: float) -> None:
        """Stop all workers if none has answered the probe for `SILENT_SECONDS`.

        Args:
            clock_seconds: Float, the present time of the coordinator's `clock`.
        """
        # If this process was suspended, the probe has not asked the workers for a
        # while, so their silence is checked only once the nodes have had time to
        # connect again.
        is_new = clock_seconds < self._joined_at + _GRACE_SECONDS
        if is_new or not self._roster.nodes:
            return
        since = clock_seconds - (self._probe.seen_at or clock_seconds)
        if since >= SILENT_SECONDS and not any(n.is_done for n in self._roster.nodes):
            reason = f"has lost the others: no worker has answered for {since:.0f} s"
            failure = Failure(0, NODE_LOST, reason)
            self._stop(NODE_LOST, failure, f"worker 0 {reason}; all stop")

    def _admit(self, node: Node) -> None:
        """Ask a joining node for free ports, and let it start workers at them.

        The first call asks for the ports. A call after the answer orders the start, and
        sends the new addresses to all nodes; it asks again if a port is taken.
        """
        if node.rank is None:
            node.rank = self._roster.free_ranks()[0]
        if node.ports_attempt != self._attempt:
            self._ask_for_ports(node)
        elif node.ports is not None:
            taken = {(host, p) for host, ports in self._by_rank.values() for p in ports}
            if any((self._host_of(node), port) in taken for port in node.ports):
                self._ask_for_ports(node)
                return
            self._set_place(node, node.ports)
            places = self._update_places()
            self._start_node(node, places, is_late=True)
            self._send_all("places", nodes=places)

    def _host_of(self, node: Node) -> str:
        """Return the IP address at which the other nodes reach a connected node."""
        return self._roster.hosts()[self._roster.nodes.index(node)]

    def _set_place(self, node: Node, ports: list[int]) -> None:
        """Record a node's IP address and its workers' ports, by the node's rank."""
        assert node.rank is not None
        self._by_rank[node.rank] = self._host_of(node), ports

    def _update_places(self) -> NodeAddresses:
        """Return the addresses of all workers, and pass them to the probe.

        From now on the probe asks the workers at these addresses whether they train.

        Returns:
            List of pairs of a node's IP address and its workers' ports, by rank of the
            node. A node that an earlier node 0 has lost gets ports at which nothing
            listens.
        """
        host, ports = next(iter(self._by_rank.values()))
        size = len(ports)
        places = [
            self._by_rank.get(rank, (host, [rank * size + i + 1 for i in range(size)]))
            for rank in range(max(self._by_rank) + 1)
        ]
        self._probe.watch(places, self._id)
        return places

    def _start(self, places: NodeAddresses) -> None:
        """Order all nodes to start their workers, and probe whether these train."""
        super()._start(places)
        self._by_rank = dict(enumerate(places))
        self._probe.forget()
        self._update_places()

    def _gather(self) -> None:
        """Begin to wait for nodes; connected ones, except node 0, lose their ranks."""
        super()._gather()
        self._roster.revoke_ranks()
        for node in self._roster.nodes:
            # A node that has reconnected requested its rank of the previous attempt,
            # which is no longer valid. Only node 0 keeps its rank.
            if node.rank:
                node.rank = None
        self._joined_at = self._clock()

    def _handle_failure(self, node: Node, failure: Failure) -> None:
        """Handle a failed worker: stop all workers, unless they train without it.

        If workers train, and their last answer to the probe does not name the failed
        worker as one of them, a network partition may have cut it off. Its failure is
        then ignored.
        """
        if self._trains and self._roster.has_worker(node, failure.rank):
            host, ports = self._by_rank[node.rank or 0]
            port = ports[failure.rank - self._roster.first_rank(node)]
            if join_address(host, port) not in self._probe.members:
                return
        super()._handle_failure(node, failure)

    def _handle_loss(self, node: Node, how: str) -> None:
        """Continue without a lost node if workers train, or else stop all workers.

        The loss of a node that has not started workers has no effect.

        Args:
            node: The lost `Node`.
            how: String for messages, such as `"has ended its connection"`.
        """
        if not node.has_started:
            return
        if not self._trains:
            super()._handle_loss(node, how)
            return
        self._last_code = NODE_LOST
        number = len(self._roster.nodes)
        self._send_notice(
            f"{node} was lost: it {how}; training continues with {number} "
            f"{'node' if number == 1 else 'nodes'}"
        )

    def _handle_leave(self, node: Node, message: Mapping[str, Any]) -> None:
        """Let a node that has received a signal leave a job that continues.

        The other nodes receive a notice, and their workers continue. The node is
        removed once its workers have stopped: now, or when it reports that. In phases
        other than `RUNNING` the effect is that of `Coordinator._handle_leave`.

        Args:
            node: `Node` that leaves.
            message: Mapping with `"code"`, an int, the exit code of the node's
                launcher; and `"why"`, a string for the notice.
        """
        if self.phase is not Phase.RUNNING or not isinstance(message.get("code"), int):
            super()._handle_leave(node, message)
        elif node.has_stopped:
            self._dismiss(node, message["code"])
        else:
            node.is_leaving = True
            why = shorten(str(message.get("why")))
            for other in self._roster.nodes:
                if other is not node:
                    text = f"{why} on {node}: its workers stop, the others continue"
                    other.link.send({"type": "notice", "text": text})

    def _dismiss(self, node: Node, code: int) -> None:
        """Order the launcher of one node to exit with a code, and remove the node."""
        node.link.send({"type": "end", "code": code, "text": ""})
        self._roster.nodes.remove(node)

    def _join_notice(self, node: Node) -> str:
        """Return the notice about a node that joins a running job."""
        return f"{node} has come, and its workers join the others"
