"""The clusters of a test session: they run cases ahead of the tests that ask."""

from __future__ import annotations

import collections
import collections.abc
import concurrent.futures
import pathlib
import tempfile

from tests.harness.compare import assert_equal_results, assert_same_on_all_workers
from tests.harness.lane import Lane, Outcomes
from tests.harness.registry import Case
from tests.harness.setups import BY_NAME, MIRRORED, REFERENCE

# Most cases of the quick tier run on this set-up, which has one process: without a
# second queue one core would wait in the end.
QUEUES = {MIRRORED.name: 2}


class CaseFailed(AssertionError):
    """A case that raised on a worker, or whose workers died or took too long."""


class ClusterPool:
    """Runs cases on clusters that are shared by all tests.

    Each set-up has a queue of its own, or some. What the tests are going to ask for is
    queued at once, so that no set-up waits for another one.

    Args:
        flavor: `"tfdp"` or `"stock"`.
        planned: The cases and set-ups that the tests will ask for, in their order.
    """

    def __init__(
        self,
        flavor: str,
        planned: collections.abc.Iterable[tuple[Case, str]] = (),
    ):
        self.flavor = flavor
        # Seconds of processors, of all workers, by names of case and set-up.
        self.costs: dict[tuple[str, str], float] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._turns: collections.Counter[str] = collections.Counter()
        self._outcomes: dict[tuple[str, str], Outcomes] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="cases-")
        self._num_runs = 0
        for case, setup_name in planned:
            if case.side_by_side:
                self._submit(case, setup_name, is_planned=True)

    def check(self, case: Case, setup_name: str) -> None:
        """Runs a case on a set-up and compares it with one device."""
        results = self.run(case, setup_name)
        assert_same_on_all_workers(results)
        if case.compare and not case.fresh:
            reference = self._outcomes[_reference_of(case, setup_name)]
            expected = self._results(case, REFERENCE.name, reference)
            assert_equal_results(results[0], expected[0], case.tol, case.skip)

    def run(self, case: Case, setup_name: str, group: str = "") -> list[dict]:
        """Runs a case, unless it has been, and returns the results of every worker.

        Args:
            case: The case.
            setup_name: Name of the set-up.
            group: Tests of one group share clusters with no others.

        Returns:
            The flat results of each worker.

        Raises:
            CaseFailed: If it raised on any worker, died or took too long.
        """
        if not case.side_by_side:
            concurrent.futures.wait(self._outcomes.values())
        if (case.name, setup_name) not in self._outcomes:
            self._submit(case, setup_name, group)
        outcomes = self._outcomes.pop((case.name, setup_name))
        return self._results(case, setup_name, outcomes)

    def close(self) -> None:
        """Kills every cluster."""
        for lane in self._lanes.values():
            lane.close()
        self._folder.cleanup()

    def _submit(
        self, case: Case, setup_name: str, group: str = "", is_planned: bool = False
    ) -> None:
        """Queues a case and what it is compared with."""
        tmp = self._new_folder()
        lane = self._lane(setup_name, "fresh" if case.fresh else group)
        outcomes = lane.submit(case, tmp, is_planned=is_planned)
        self._outcomes[case.name, setup_name] = outcomes
        key = _reference_of(case, setup_name)
        if case.fresh or not case.compare or key in self._outcomes:
            return
        self._outcomes[key] = self._lane(REFERENCE.name).submit(
            case,
            tmp if case.reference_last else self._new_folder(),
            is_planned=is_planned,
            after=outcomes if case.reference_last else None,
        )

    def _lane(self, setup_name: str, group: str = "") -> Lane:
        if not group:
            self._turns[setup_name] += 1
            group = str(self._turns[setup_name] % QUEUES.get(setup_name, 1))
        key = setup_name, group
        if key not in self._lanes:
            self._lanes[key] = Lane(BY_NAME[setup_name], self.flavor)
        return self._lanes[key]

    def _new_folder(self) -> pathlib.Path:
        self._num_runs += 1
        folder = pathlib.Path(self._folder.name) / f"run{self._num_runs}"
        folder.mkdir()
        return folder

    def _results(self, case: Case, setup_name: str, outcomes: Outcomes) -> list[dict]:
        found = outcomes.result()
        self.costs[case.name, setup_name] = sum(o.cpu_seconds for o in found)
        errors = [
            f"on worker {rank}:\n{outcome.error}"
            for rank, outcome in enumerate(found)
            if outcome.error
        ]
        if errors:
            raise CaseFailed("\n".join(errors))
        return [outcome.results or {} for outcome in found]


def _reference_of(case: Case, setup_name: str) -> tuple[str, str]:
    """The key of what a case is compared with: of one run, unless that opens files."""
    after = f" after {setup_name}" if case.reference_last else ""
    return case.name, REFERENCE.name + after
