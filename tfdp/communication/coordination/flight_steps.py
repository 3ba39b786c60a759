"""Steps whose collectives TensorFlow runs, in flight records.

TensorFlow's collectives run inside a graph, in which each measurement would be another
operation. A flight record has the steps of Keras's loops instead: when each has begun
and ended, and the collectives that were traced for it. Outside of these loops it has
the last calls of functions with collectives.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tfdp.communication.coordination.flight_record import (
    CollectiveIdentity,
    RecordedCollective,
)
from tfdp.communication.coordination.progress import ComputedStep

# TensorFlow's collectives are not recorded one by one. In a flight record, an entry of
# this kind stands for all collectives of a step or call, in a lane for steps of Keras's
# loops and one for calls outside of them.
TENSORFLOW, _STEPS, _CALLS = "collectives of TensorFlow", "steps", "calls"
_SEPARATOR, _END = "; ", "no further one"


class TracedCollective(NamedTuple):
    """A collective of TensorFlow in the graph of a step.

    Args:
        name: String, its kind and name scope, such as `"all_reduce 'bucket_0'"`.
        form: String, equal on all workers, such as `"all_reduce of float32[4]"`.
        num_bytes: Int, bytes of one replica's tensor; 0 if known only at run time.
    """

    name: str
    form: str
    num_bytes: int


class TracedCollectives:
    """Collectives of TensorFlow that were traced in each of Keras's loops.

    Example:

    >>> import threading
    >>> traced = TracedCollectives()
    >>> graph = threading.Lock()  # stands for a graph
    >>> form = "all_reduce of float32[16]"
    >>> traced.add("fit", graph, TracedCollective("all_reduce 'bucket_0'", form, 64))
    >>> form = "all_gather of int32[2]"
    >>> traced.add("fit", graph, TracedCollective("all_gather 'rows'", form, 8))
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

        Args:
            loop: String, name of the loop.

        Returns:
            Tuple of the description, a string, and the bytes of all collectives; or
            `None` without collectives.
        """
        plan = self._plan(loop)
        return _describe(plan) if plan else None

    def of_function(self, graph: Any) -> list[TracedCollective]:
        """Return the collectives of a function traced outside of Keras's loops.

        Args:
            graph: The graph of the function.

        Returns:
            List of `TracedCollective` in the order of tracing, empty without any.
        """
        return self._plans.get("", {}).get(graph, [])

    def _plan(self, loop: str) -> list[TracedCollective]:
        """Return the collectives of a loop's step, in order; empty if it has none.

        Of the functions traced in the loop, the one with the most collectives is the
        step.
        """
        plans = self._plans.get(loop)
        if plans is None:
            return []
        # `keyrefs` returns a copy, which another thread's tracing does not change.
        graphs = [reference() for reference in plans.keyrefs()]
        found = [plans.get(each, []) for each in graphs if each is not None]
        return max(found, key=len, default=[])


def call_of(
    plan: Sequence[TracedCollective], num_workers: int
) -> tuple[CollectiveIdentity, int]:
    """Return the identity and the size of a call's entry in the flight record.

    The entry stands for all collectives of TensorFlow in one call of a function outside
    of Keras's loops.

    Args:
        plan: Sequence of `TracedCollective`, those of the call in order, not empty.
            The `key` of the identity is their order.
        num_workers: Int, number of workers of the job.

    Returns:
        Tuple of a `CollectiveIdentity`, and the bytes of all collectives of the call.
    """
    (name, num_bytes), ranks = _describe(plan), tuple(range(num_workers))
    order = _SEPARATOR.join(each.form for each in plan)
    return CollectiveIdentity(_CALLS, ranks, TENSORFLOW, "", order, name), num_bytes


def _describe(plan: Sequence[TracedCollective]) -> tuple[str, int]:
    """Name the largest collective and the number of others; return that and all bytes.

    Args:
        plan: Sequence of `TracedCollective`, not empty.
    """
    largest = max(plan, key=lambda each: each.num_bytes)
    more = f" and {len(plan) - 1} more" if len(plan) > 1 else ""
    return largest.name + more, sum(each.num_bytes for each in plan)


def first_in_other_order(orders: Mapping[int, str]) -> tuple[int, dict[int, str]]:
    """Return the first collective that workers have traced in different orders.

    Args:
        orders: Mapping from a rank to the order of its collectives, the `key` from
            `call_of`. At least two orders differ.

    Returns:
        Tuple of the collective's number in the order, from 1, and a dict from a rank to
        its `TracedCollective.form`, or to `"no further one"`.

    Example:

    >>> first_in_other_order({0: "a; b; c", 1: "a; c; b"})
    (2, {0: 'b', 1: 'c'})
    """
    ended = [[*order.split(_SEPARATOR), _END] for order in orders.values()]
    plans = zip(*ended, strict=False)
    for number, forms in enumerate(plans, 1):
        if len(set(forms)) > 1:
            return number, dict(zip(orders, forms, strict=True))
    raise AssertionError(orders)


def recorded_steps(
    steps: Sequence[ComputedStep],
    num_workers: int,
    waits_for_data: bool,
    traced: TracedCollectives,
) -> list[RecordedCollective]:
    """Return an entry of a flight record for each step with collectives of TensorFlow.

    An entry names the largest collective of the step, and has the bytes of all.

    Args:
        steps: Sequence of `ComputedStep`, the last ones of this worker.
        num_workers: Int, number of workers of the job.
        waits_for_data: Bool, whether this worker waits for a batch: it has not entered
            the collectives of its step then.
        traced: `TracedCollectives` of this worker.
    """
    found = []
    ranks = tuple(range(num_workers))
    for step in steps:
        plan = traced.describe(step.loop)
        if plan is None or (step.end is None and waits_for_data):
            continue
        name, num_bytes = plan
        found.append(
            RecordedCollective(
                lane=_STEPS,
                ranks=ranks,
                kind=TENSORFLOW,
                dtype="",
                # The order of a step's collectives is not compared, since a step may
                # run any traced function of its loop.
                key="",
                name=name,
                number=step.number,
                num_bytes=num_bytes,
                begin=step.begin,
                end=step.end,
            )
        )
    return found


# A function is traced once and called often, so its collectives are kept from the time
# of tracing, for flight records of this process.
traced_collectives = TracedCollectives()
