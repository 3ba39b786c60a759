"""`tfdp run --nodes MIN:MAX`: the part of a node in a job that outlives its nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdp.communication.cluster import Cluster
from tfdp.communication.cluster.address import split_address
from tfdp.communication.coordination.preemption import PREEMPTED
from tfdp.launch.cli.attempts import NodeAttempts
from tfdp.launch.cli.elastic import ElasticJob
from tfdp.launch.cli.job import Job
from tfdp.launch.cli.other_nodes import ElasticNodes
from tfdp.launch.cli.worker import LogFile, Worker
from tfdp.launch.rendezvous.coordinator import Places


class ElasticNodeJob(ElasticJob):
    """Workers of one node of an elastic job.

    Args:
        most_replacements: Int, most replacements of this node's workers together.
        history: Sequence of `LogFile` that record the failures.
        others: `ElasticNodes`, the connection to node 0.
        clusters_of: Function that returns the clusters of this node's workers, from the
            places of all nodes.
        is_late: Bool, whether the workers of other nodes train already.
        **options: Further arguments of `Job`.
    """

    def __init__(
        self,
        most_replacements: int,
        history: Sequence[LogFile],
        others: ElasticNodes,
        clusters_of: Callable[[Places], list[Cluster]],
        *,
        is_late: bool,
        **options: Any,
    ) -> None:
        super().__init__(most_replacements, history, others=others, **options)
        self._nodes, self._clusters_of = others, clusters_of
        if is_late:
            self._late.update(range(len(self._clusters)))

    def _has_success(self) -> bool:
        """Return whether a worker of any node of the job has ended without an error."""
        return self._nodes.is_over or super()._has_success()

    def _is_incomplete(self) -> bool:
        """Return whether node 0 is lost, so that workers may be missing unnoticed.

        If it is, this launcher checks by itself that workers train. Otherwise node 0
        checks that for all nodes.
        """
        return self._nodes.is_alone

    def _after_failure(self, failed: Worker) -> int | None:
        """Replace a failed worker while others train, or else end the attempt."""
        if self._nodes.places is not None:
            # A replacement joins the workers at their present addresses.
            self._clusters = self._clusters_of(self._nodes.places)
        if self._has_success() or self.job_runs():
            return super()._after_failure(failed)
        return self._end_by_failure(failed)


class ElasticAttempts(NodeAttempts):
    """Loop over this node's part of an elastic job, which may outlive node 0."""

    _others: ElasticNodes
    _code: int | None = None

    def _job(self, clusters: list[Cluster], *, is_late: bool) -> Job:
        """Create this node's part of an elastic job.

        The rank, attempt and ports of this node's workers are recorded in the
        connection to node 0, which sends them when it joins node 0 again after a loss.

        Args:
            clusters: List of `Cluster`, one for each worker of this node.
            is_late: Bool, whether the workers of other nodes train already.
        """
        own = [address for c in clusters if (address := c.address)]
        self._others.running = {
            "node_rank": self._node_rank,
            "attempt": self._others.attempt,
            "attempt_id": self._attempt_id,
            "ports": [split_address(address)[1] for address in own],
        }
        self._others.places, self._others.trains = None, is_late
        self._code = None
        job = ElasticNodeJob(
            self._settings.max_restarts,
            self._history,
            self._others,
            self._clusters,
            is_late=is_late,
            context=self._context,
            clusters=clusters,
            logs=self._logs,
        )
        self._others.job_runs = job.job_runs
        return job

    def _after(self, job: Job, code: int) -> None:
        """Keep the exit code of this node's workers, and report it to node 0."""
        self._others.running = {}
        super()._after(job, code)
        self._code = PREEMPTED if code and job.is_preempted else code

    def _handle(self, message: dict[str, Any]) -> Job | int | None:
        """Handle a message of node 0; its loss does not end the job of this node.

        After the loss, a node whose workers are done exits with 0. Any other, except
        node 0's own, waits for a new node 0: nodes without workers cannot start any by
        themselves, since several of them would each begin a job. Everything else is
        handled by `NodeAttempts._handle`.

        Returns:
            `Job` to run, int, the exit code of this node, or `None` to wait for a
            message.
        """
        if message.get("type") == "lost" and self._exit_code is None:
            if self._code == 0:
                return 0
            if not self._others.is_node_0:
                self._others.wait_again(message["text"])
                return None
        return super()._handle(message)

    def _check_end(self) -> int | None:
        """Return the exit code if this node must stop waiting for node 0's messages.

        While node 0 is lost, it is that of this node's workers, once they have ended.
        Otherwise `NodeAttempts._check_end` decides: after a signal or `--timeout`.

        Returns:
            Int, or `None` to wait further.
        """
        return self._code if self._others.is_alone else super()._check_end()
