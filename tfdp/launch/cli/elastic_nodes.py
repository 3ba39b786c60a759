"""`tfdp run --nodes MIN:MAX`: the part of a node in a job that outlives its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.communication.cluster import Cluster
from tfdp.communication.cluster.address import split_address
from tfdp.launch.cli.attempts import NodeAttempts
from tfdp.launch.cli.coordinator_connection import ElasticCoordinatorConnection
from tfdp.launch.cli.elastic import ElasticJob
from tfdp.launch.cli.job import Job
from tfdp.launch.cli.worker import Worker
from tfdp.launch.rendezvous.coordinator import NodeAddresses


class ElasticNodeJob(ElasticJob):
    """Workers of one node of an elastic job.

    Args:
        clusters_of: Function that returns the clusters of this node's workers, from the
            addresses and ports of all nodes.
        is_late: Bool, whether the workers of other nodes train already. This node's
            workers then join them, and are stopped if they come too late for that.
        **options: Arguments of `ElasticJob`, with `coordinator`.
    """

    _coordinator: ElasticCoordinatorConnection

    def __init__(
        self,
        clusters_of: Callable[[NodeAddresses], list[Cluster]],
        *,
        is_late: bool,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._clusters_of = clusters_of
        if is_late:
            self._late.update(range(len(self._clusters)))

    def _has_success(self) -> bool:
        """Return whether a worker of any node of the job has ended without an error."""
        return self._coordinator.done_node is not None or super()._has_success()

    def _is_incomplete(self) -> bool:
        """Return whether node 0 is lost, so that workers may be missing.

        While node 0 is lost, this launcher checks by itself that workers train.
        Otherwise node 0 checks it for all nodes.
        """
        return self._coordinator.has_lost_node_0

    def _after_failure(self, failed: Worker) -> int | None:
        """Replace a failed worker while others train, or else end the attempt.

        Returns:
            Int, the exit code of the attempt, or `None` if it continues.
        """
        if self._coordinator.places is not None:
            # Nodes may have joined since the start of the attempt, so a replacement
            # needs the present addresses of all workers.
            self._clusters = self._clusters_of(self._coordinator.places)
        if self._has_success() or self.is_job_running():
            return super()._after_failure(failed)
        return self._end_by_failure(failed)


class ElasticAttempts(NodeAttempts):
    """This node's part of an elastic job, whose workers may outlive node 0."""

    _coordinator: ElasticCoordinatorConnection

    def _job(self, message: dict[str, Any]) -> Job:
        """Create this node's part of an elastic job.

        The rank, attempt and ports of this node's workers are recorded in the
        connection to node 0, which sends them when it joins node 0 again after a loss.

        Args:
            message: Dict, message of node 0 of type `"start"`.
        """
        clusters, is_late = self._clusters(message["nodes"]), bool(message["is_late"])
        own = [address for c in clusters if (address := c.address)]
        self._coordinator.running = {
            "node_rank": self._node_rank,
            "attempt": self._coordinator.attempt,
            "attempt_id": self._attempt_id,
            "ports": [split_address(address)[1] for address in own],
        }
        self._coordinator.places, self._coordinator.has_trained = None, is_late
        job = ElasticNodeJob(
            self._clusters,
            is_late=is_late,
            most_replacements=self._settings.max_restarts,
            history=self._history,
            coordinator=self._coordinator,
            context=self._context,
            clusters=clusters,
            logs=self._logs,
        )
        self._coordinator.is_job_running = job.is_job_running
        return job

    def _handle_end(self, job: Job, code: int) -> None:
        """Report the end of this node's workers to node 0; record that none runs."""
        self._coordinator.running = {}
        super()._handle_end(job, code)

    def _handle(self, message: dict[str, Any]) -> Job | int | None:
        """Handle a message of node 0; its loss does not end the job of this node.

        If node 0 is lost, a node whose workers have ended with exit code 0 exits with
        0. Any other node waits for a new node 0: if nodes started workers by
        themselves, each would begin a separate job. A node that has left the job, node
        0 itself and all other messages are handled by `NodeAttempts._handle`.

        Returns:
            `Job` to run, int, the exit code of this node, or `None` to wait for a
            message.
        """
        if message.get("type") == "lost" and not self._coordinator.has_left:
            if self._code == 0:
                return 0
            if not self._coordinator.is_node_0:
                self._coordinator.rejoin_node_0(message["text"])
                return None
        return super()._handle(message)

    def _check_end(self) -> int | None:
        """Handle signals and `--timeout` while no worker runs on this node.

        Returns:
            Int, the exit code if this node must not wait any longer, or else `None`. If
            node 0 was lost while workers ran, it is the exit code of the workers.
        """
        return self._code if self._coordinator.has_lost_node_0 else super()._check_end()
