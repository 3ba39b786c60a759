"""A set-up's own queue of cases, run one after the other while the tests go on."""

from __future__ import annotations

import concurrent.futures
import itertools
import pathlib
import queue
import threading
import typing

from tests.harness.cluster import Cluster, ClusterError
from tests.harness.registry import Case
from tests.harness.results import Outcome
from tests.harness.setups import Setup

Outcomes = concurrent.futures.Future[list[Outcome]]
_CLOSING_SECONDS = 10.0
# TensorFlow forgets no function that was traced, and each new one costs more.
CASES_PER_CLUSTER = 15


class Job(typing.NamedTuple):
    """A case to run, and what will be its outcome on every worker."""

    case: Case
    tmp: pathlib.Path
    after: Outcomes | None
    outcomes: Outcomes


class Lane:
    """Runs cases on a cluster of one set-up, which it starts when needed.

    Args:
        setup: The set-up.
        flavor: `"tfdp"` or `"stock"`.
    """

    def __init__(self, setup: Setup, flavor: str):
        self.setup = setup
        self._flavor = flavor
        self._cluster: Cluster | None = None
        self._num_cases = 0
        self._is_closed = False
        # First those that a test waits for; `None` ends the thread.
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]]
        self._jobs = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(
        self,
        case: Case,
        tmp: pathlib.Path,
        *,
        is_planned: bool = False,
        after: Outcomes | None = None,
    ) -> Outcomes:
        """Queues a case.

        Args:
            case: The case.
            tmp: The directory that the workers share.
            is_planned: Whether those that a test waits for go first.
            after: What has to have ended before it is run.

        Returns:
            What will be its outcome on every worker.
        """
        job = Job(case, tmp, after, concurrent.futures.Future())
        self._jobs.put((int(is_planned), next(self._numbers), job))
        return job.outcomes

    def close(self) -> None:
        """Kills the workers; what is queued is not run."""
        self._is_closed = True
        self._jobs.put((-1, next(self._numbers), None))
        if self._cluster is not None:
            self._cluster.kill()
        self._thread.join(_CLOSING_SECONDS)

    def _work(self) -> None:
        while job := self._jobs.get()[-1]:
            try:
                job.outcomes.set_result(self._run(job))
            except BaseException as error:  # noqa: BLE001 raised where it is awaited
                job.outcomes.set_exception(error)
        self._end_cluster()

    def _run(self, job: Job) -> list[Outcome]:
        if job.after is not None:
            concurrent.futures.wait([job.after])
        if self._is_closed:
            return [Outcome(error="not run: the tests have ended")]
        try:
            cluster = self._healthy_cluster(job.case.fresh)
            cluster.send(job.case.name, job.tmp)
            return cluster.collect(job.case.deadline_seconds)
        except ClusterError as error:
            return [Outcome(error=str(error))]

    def _healthy_cluster(self, is_fresh: bool) -> Cluster:
        is_worn = self._num_cases == CASES_PER_CLUSTER
        if self._cluster is None or not self._cluster.healthy or is_fresh or is_worn:
            self._end_cluster()
            self._cluster, self._num_cases = Cluster(self.setup, self._flavor), 0
        self._num_cases += 1
        return self._cluster

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
