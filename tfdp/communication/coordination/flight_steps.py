"""Steps whose collectives TensorFlow runs, in flight records.

TensorFlow's collectives run inside a graph, in which each measurement would be another
operation. A flight record has the steps of Keras's loops instead: when each has begun
and ended, and the collectives that were traced for it.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from tfdp.communication.coordination.flight_record import RecordedCollective
from tfdp.communication.coordination.progress import ProgressRecorder

# Kind of an entry that stands for all collectives of a step, and its lane.
TENSORFLOW, _LANE = "collectives of TensorFlow", "steps"


class TracedCollective(NamedTuple):
    """A collective of TensorFlow in the graph of a step.

    Args:
        name: String, its kind and name scope, such as `"all_reduce 'bucket_0'"`.
        num_bytes: Int, bytes of one replica's tensor; 0 if known only at run time.
    """

    name: str
    num_bytes: int


class TracedCollectives:
    """Collectives of TensorFlow that were traced in each of Keras's loops.

    Example:

    >>> import threading
    >>> traced = TracedCollectives()
    >>> graph = threading.Lock()  # stands for a graph
    >>> traced.add("fit", graph, TracedCollective("all_reduce 'bucket_0'", 64))
    >>> traced.add("fit", graph, TracedCollective("all_gather 'rows'", 8))
    >>> traced.describe("fit")
    ("all_reduce 'bucket_0' and 1 more", 72)
    """

    def __init__(self) -> None:
        self._plans: dict[
            str, weakref.WeakKeyDictionary[Any, list[TracedCollective]]
        ] = {}

    def add(self, loop: str, graph: Any, collective: TracedCollective) -> None:
        """Add a collective that is being traced.

        Args:
            loop: String, name of the innermost loop of Keras, or `""`.
            graph: The graph of the outermost function that is being traced.
            collective: `TracedCollective`.
        """
        plans = self._plans.setdefault(loop, weakref.WeakKeyDictionary())
        plans.setdefault(graph, []).append(collective)

    def describe(self, loop: str) -> tuple[str, int] | None:
        """Describe the collectives of a loop's step: the largest one, and the number.

        Of all functions of the loop, the step is the one with most collectives.

        Args:
            loop: String, name of the loop.

        Returns:
            Tuple of a string and the sum of their bytes, or `None` without collectives.
        """
        if loop not in self._plans:
            return None
        plan = max(list(self._plans[loop].values()), key=len, default=[])
        if not plan:  # its functions were deleted
            return None
        largest = max(plan, key=lambda each: each.num_bytes)
        more = f" and {len(plan) - 1} more" if len(plan) > 1 else ""
        return largest.name + more, sum(each.num_bytes for each in plan)


def recorded_steps(
    num_workers: int,
    waits_for_data: bool,
    recorder: ProgressRecorder,
    traced: TracedCollectives,
) -> list[RecordedCollective]:
    """Return the last steps with collectives of TensorFlow, as entries of a record.

    Args:
        num_workers: Int, number of workers of the job.
        waits_for_data: Bool, whether this worker waits for a batch: it has not entered
            the collectives of its step then.
        recorder: `ProgressRecorder` of this worker.
        traced: `TracedCollectives` of this worker.
    """
    found = []
    ranks = tuple(range(num_workers))
    for step in recorder.steps():
        plan = traced.describe(step.loop)
        if plan is None or (step.end is None and waits_for_data):
            continue
        name, num_bytes = plan
        found.append(
            RecordedCollective(
                lane=_LANE,
                ranks=ranks,
                kind=TENSORFLOW,
                dtype="",
                key="",
                name=name,
                number=step.number,
                num_bytes=num_bytes,
                begin=step.begin,
                end=step.end,
            )
        )
    return found


# The collectives of this process.
traced_collectives = TracedCollectives()
