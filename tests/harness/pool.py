"""One cluster per set-up for the whole test session, started when needed."""

from __future__ import annotations

import pathlib
import tempfile

import pytest

from harness.cluster import Cluster, ClusterError
from harness.compare import assert_equal_results, assert_same_on_all_workers
from harness.registry import Case
from harness.results import Outcome
from harness.setups import BY_NAME, REFERENCE


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
        self._references: dict[str, dict] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="cases-")
        self._num_runs = 0

    def check(self, case: Case, setup_name: str) -> None:
        """Runs a case on a set-up and compares it with one device."""
        if case.fresh:
            assert_same_on_all_workers(self.run(case, setup_name))
            return
        tmp = self._new_folder()
        needs = case.compare and case.name not in self._references
        at_once = needs and not case.reference_last
        # One device and the set-up share the cores: run them side by side.
        names = [setup_name, *([REFERENCE.name] if at_once else [])]
        started = [self._send(case, name, tmp) for name in names]
        answers = [self._collect(case, cluster) for cluster in started]
        results = self._results(answers[0])
        if at_once:
            self._references[case.name] = self._results(answers[1])[0]
        assert_same_on_all_workers(results)
        if case.reference_last:
            reference = self.run(case, REFERENCE.name, tmp)[0]
        elif case.compare:
            reference = self._references[case.name]
        else:
            return
        assert_equal_results(results[0], reference, case.tol, case.skip)

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

    def _send(self, case, setup_name, tmp, group="") -> Cluster:
        key = setup_name, group
        cluster = self._clusters.get(key)
        if cluster is None or not cluster.healthy:
            if cluster is not None:
                cluster.close()
            cluster = Cluster(BY_NAME[setup_name], self.flavor)
            self._clusters[key] = cluster
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
