"""One cluster per set-up for the whole test session, started when needed."""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from tests.harness.cluster import Cluster, ClusterError
from tests.harness.compare import assert_equal_results, assert_same_on_all_workers
from tests.harness.registry import Case
from tests.harness.results import Outcome
from tests.harness.setups import BY_NAME, REFERENCE


class CaseFailed(AssertionError):
    """A case that raised on a worker."""


class ClusterPool:
    """Runs cases on clusters that are shared by all tests.

    Args:
        flavor: `"tfdp"` or `"stock"`.
    """

    def __init__(self, flavor: str):
        self.flavor = flavor
        self.seconds: dict[tuple[str, str], float] = {}
        self._clusters: dict[tuple[str, str], Cluster] = {}
        # The set-ups on which this session is to run each case, by its name.
        self.planned: dict[str, list[str]] = {}
        self._outcomes: dict[tuple[str, str], list[Outcome]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="cases-")
        self._num_runs = 0

    def check(self, case: Case, setup_name: str) -> None:
        """Runs a case on a set-up and compares it with one device."""
        if case.fresh:
            assert_same_on_all_workers(self.run(case, setup_name))
            return
        if case.reference_last:
            tmp = self._new_folder()
            results = self.run(case, setup_name, tmp)
            reference = self.run(case, REFERENCE.name, tmp)
        else:
            self._run_side_by_side(case, setup_name)
            results = self._results(self._outcomes.pop((case.name, setup_name)))
            reference = []
            if case.compare:
                reference = self._results(self._outcomes[case.name, REFERENCE.name])
        assert_same_on_all_workers(results)
        if case.compare:
            assert_equal_results(results[0], reference[0], case.tol, case.skip)

    def _run_side_by_side(self, case: Case, setup_name: str) -> None:
        """Runs a case on all the set-ups of this session that it is still to see.

        A step waits for messages more than it computes, so that set-ups which run
        at the same time take hardly longer than one.
        """
        if (case.name, setup_name) in self._outcomes:
            return
        planned = self.planned.get(case.name, []) if case.side_by_side else []
        names = [setup_name, *(name for name in planned if name != setup_name)]
        if case.compare and (case.name, REFERENCE.name) not in self._outcomes:
            names.append(REFERENCE.name)
        self.planned.pop(case.name, None)
        tmp = self._new_folder()
        for name in names:
            self._cluster(name)
        started: list[Cluster] = []
        try:
            started.extend(self._send(case, name, tmp) for name in names)
        except BaseException:
            # Answers that nobody collects would be taken for those to the next case.
            for cluster in started:
                cluster.close()
            raise
        for name, cluster in zip(names, started, strict=True):
            self._outcomes[case.name, name] = self._collect(case, cluster)

    def run(
        self,
        case: Case,
        setup_name: str,
        tmp: pathlib.Path | None = None,
        group: str = "",
    ) -> list[dict]:
        """Runs a case and returns the flat results of every worker.

        Args:
            case: The case.
            setup_name: Name of the set-up.
            tmp: The directory that the workers share; a new one if `None`.
            group: Tests of one group share clusters with no others.

        Raises:
            CaseFailed: If it raised on any worker, died or took too long.
        """
        group = case.name if case.fresh else group
        cluster = self._send(case, setup_name, tmp or self._new_folder(), group)
        results = self._results(self._collect(case, cluster))
        if case.fresh:
            cluster.close()
        return results

    def close(self) -> None:
        """Kills every cluster."""
        for cluster in self._clusters.values():
            cluster.close()
        self._folder.cleanup()

    def _new_folder(self) -> pathlib.Path:
        self._num_runs += 1
        folder = pathlib.Path(self._folder.name) / f"run{self._num_runs}"
        folder.mkdir()
        return folder

    def _cluster(self, setup_name: str, group: str = "") -> Cluster:
        key = setup_name, group
        cluster = self._clusters.get(key)
        if cluster is None or not cluster.healthy:
            if cluster is not None:
                cluster.close()
            cluster = Cluster(BY_NAME[setup_name], self.flavor)
            self._clusters[key] = cluster
        return cluster

    def _send(self, case, setup_name, tmp, group="") -> Cluster:
        cluster = self._cluster(setup_name, group)
        # Own folder per set-up: the reference may run at the same time.
        own = tmp if case.reference_last else tmp / setup_name
        own.mkdir(exist_ok=True)
        try:
            cluster.send(case.name, own)
        except ClusterError as error:
            pytest.fail(str(error), pytrace=False)
        return cluster

    def _collect(self, case: Case, cluster: Cluster) -> list[Outcome]:
        try:
            outcomes = cluster.collect(case.deadline_seconds)
        except ClusterError as error:
            return [Outcome(None, str(error))]
        slowest = max(outcome.seconds for outcome in outcomes)
        self.seconds[case.name, cluster.setup.name] = slowest
        return outcomes

    def _results(self, outcomes: list[Outcome]) -> list[dict]:
        errors = [
            f"on worker {rank}:\n{outcome.error}"
            for rank, outcome in enumerate(outcomes)
            if outcome.error
        ]
        if errors:
            raise CaseFailed("\n".join(errors))
        return [outcome.results or {} for outcome in outcomes]
