"""Reports of workers that have failed in an attempt, and which of them to name."""

from __future__ import annotations

from tfdp.communication.cluster.tf_config import shorten
from tfdp.launch.rendezvous.failure import Failure
from tfdp.launch.rendezvous.roster import Roster


class Reports:
    """What the nodes report of their workers in one attempt.

    Args:
        roster: `Roster` of the job.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._failures: list[Failure] = []

    def add(self, failure: Failure) -> bool:
        """Add a report.

        Args:
            failure: `Failure`.

        Returns:
            Bool, whether it is known what to name; or else a worker that was lost may
            still be reported by its own node.
        """
        self._failures.append(failure)
        known = {each.rank for each in self._failures}
        return failure.lost_rank is None or failure.lost_rank in known

    def cause(self) -> Failure:
        """Return the failure that, as all say together, came first."""
        by_rank = {failure.rank: failure for failure in reversed(self._failures)}
        cause = self._failures[0]
        seen = {cause.rank}
        while cause.lost_rank in by_rank and cause.lost_rank not in seen:
            cause = by_rank[cause.lost_rank]
            seen.add(cause.rank)
        return cause

    def sentence(self) -> str:
        """Say what has failed, where and how, and where its output is."""
        cause = self.cause()
        log = f". All that it wrote: {shorten(cause.log)}, there" if cause.log else ""
        return (
            f"worker {cause.rank} on {self._roster.place(cause.rank)} "
            f"{shorten(cause.reason)}{self._because(cause)}; the workers of all nodes "
            f"were stopped{log}"
        )

    def _because(self, cause: Failure) -> str:
        lost = cause.lost_rank
        if lost is None or lost == cause.rank:
            return ""
        silent = self._roster.silent_seconds(lost)
        said = "" if silent is None else f", which has not answered for {silent:.0f} s"
        return f" since worker {lost} on {self._roster.place(lost)} was lost{said}"
