"""Proposals: the plans of a step that are worth a trial, by the cost model.

The model is right about what a link takes and wrong about what several buckets hide of
each other, so that what it ranks first need not be the fastest: it proposes plans that
differ, and their times decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfdp.features.tuning.plan_cache import PlanChoice
from tfdp.ground.plans.buckets import BucketPlan, plan_buckets
from tfdp.ground.plans.prediction import BucketPrediction, StepPrediction
from tfdp.training.reduction.algorithm_choice import AlgorithmChoice

# Algorithms of the buckets of a plan under a choice, or under none.
RoutesOf = Callable[[PlanChoice | None, BucketPlan], Sequence[AlgorithmChoice]]

MOST_PROPOSALS = 5
# Buckets hold about this part of all gradients.
_PARTS = (1, 2, 4, 8, 16, 32)
_LEAST_BUCKET_BYTES = 2**14
_FIRST_BUCKET_BYTES = 2**20
# Halvings of an interval: enough for a millionth of it.
_BISECTIONS = 20


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A plan that is worth a trial.

    Args:
        choice: `PlanChoice`.
        plan: `BucketPlan` that follows from it.
        routes: Tuple of `AlgorithmChoice`, one for each bucket.
    """

    choice: PlanChoice
    plan: BucketPlan
    routes: tuple[AlgorithmChoice, ...]

    def __str__(self) -> str:
        names = dict.fromkeys(map(str, self.routes))
        return f"{self.choice} over {' and '.join(names)}"


def propose(
    default: BucketPlan,
    step_seconds: float,
    algorithms: Sequence[str | None],
    routes_of: RoutesOf,
) -> list[Proposal]:
    """Propose plans, those that are predicted to be the fastest first.

    Args:
        default: `BucketPlan` of the default, in the order of the backward pass.
        step_seconds: Float, what a step takes with it.
        algorithms: Sequence of strings or `None`, the algorithms to try, see
            `PlanChoice`.
        routes_of: Callable, which chooses the algorithms of a plan's buckets under a
            `PlanChoice`, or under `None`, the default.

    Returns:
        List of at most five `Proposal`, all of which differ from the default and from
        each other.
    """
    routes = tuple(routes_of(None, default))
    compute_seconds = _compute_seconds(default, routes, step_seconds)
    seen = {_signature(default, routes)}
    found: list[tuple[float, Proposal]] = []
    for proposal in _all_proposals(default, algorithms, routes_of):
        signature = _signature(proposal.plan, proposal.routes)
        if signature not in seen:
            seen.add(signature)
            step = _predict(proposal.plan, proposal.routes, compute_seconds)
            found.append((step.step_seconds, proposal))
    ranked = sorted(found, key=lambda pair: pair[0])
    return _different([proposal for _, proposal in ranked])


def _all_proposals(
    default: BucketPlan, algorithms: Sequence[str | None], routes_of: RoutesOf
) -> Iterator[Proposal]:
    """All that may be proposed; the same plan may be among them twice."""
    entries = [entry for bucket in default for entry in bucket.entries]
    sizes = [max(default.num_bytes // part, _LEAST_BUCKET_BYTES) for part in _PARTS]
    for size in dict.fromkeys(sizes):
        for first in dict.fromkeys((min(size, _FIRST_BUCKET_BYTES), size)):
            plan = plan_buckets(
                entries,
                range(len(entries)),
                bucket_bytes=size,
                first_bucket_bytes=first,
            )
            for algorithm in algorithms:
                choice = PlanChoice(size, first, algorithm)
                yield Proposal(choice, plan, tuple(routes_of(choice, plan)))


def _different(ranked: Sequence[Proposal]) -> list[Proposal]:
    """The first of each bucket size; the last place is for the best that is left."""
    sizes: set[int] = set()
    chosen: list[Proposal] = []
    for proposal in ranked:
        size = proposal.choice.bucket_bytes
        if size not in sizes and len(chosen) < MOST_PROPOSALS - 1:
            sizes.add(size)
            chosen.append(proposal)
    chosen += [proposal for proposal in ranked if proposal not in chosen][:1]
    return chosen


def _compute_seconds(
    plan: BucketPlan, routes: Sequence[AlgorithmChoice], step_seconds: float
) -> float:
    """Seconds of a step without what is predicted to be exposed, by bisection."""
    low, high = 0.0, step_seconds
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _predict(plan, routes, middle).step_seconds > step_seconds:
            high = middle
        else:
            low = middle
    return low


def _predict(
    plan: BucketPlan, routes: Sequence[AlgorithmChoice], compute_seconds: float
) -> StepPrediction:
    buckets = [
        BucketPrediction(bucket.num_bytes, route.seconds)
        for bucket, route in zip(plan, routes, strict=True)
    ]
    return StepPrediction(tuple(buckets), compute_seconds)


def _signature(plan: BucketPlan, routes: Sequence[AlgorithmChoice]) -> tuple:
    """What two plans have in common that are the same."""
    return tuple(
        (tuple(entry.name for entry in bucket.entries), str(route))
        for bucket, route in zip(plan, routes, strict=True)
    )
