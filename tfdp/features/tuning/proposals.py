"""Proposals: plans of a step that are worth a trial, ranked by the cost model.

The cost model predicts the time of a collective on a link well, but not how buckets
overlap, so its first plan may not be the fastest. It therefore proposes different
plans, whose measured times decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tfdp.features.tuning.plan_cache import PlanChoice
from tfdp.ground.plans.buckets import BucketPlan, plan_buckets
from tfdp.ground.plans.prediction import BucketPrediction, StepPrediction
from tfdp.training.compression.algorithm_choice import AlgorithmChoice

# Type of a function that returns the algorithm of each bucket of a plan. The algorithm
# depends on the bucket's size and on the choice (`None` for the default), so the
# function takes both.
RoutesOf = Callable[[PlanChoice | None, BucketPlan], Sequence[AlgorithmChoice]]

# Largest number of proposals of a trial: each one is measured, which takes many steps.
MAX_PROPOSALS = 5
# The bucket sizes to try are the size of all gradients divided by these numbers: from
# one bucket for all gradients to 32, since only a trial shows how buckets overlap.
_PARTS = (1, 2, 4, 8, 16, 32)
# Smallest size of a bucket to try, in bytes: each bucket is a collective with a latency
# of its own, so small ones are slow.
_MIN_BUCKET_BYTES = 2**14
# Size of a first bucket, in bytes, that is tried in addition to a first bucket as large
# as the others: a smaller one is exchanged earlier in the backward pass.
_FIRST_BUCKET_BYTES = 2**20
# This number of halvings narrows the interval of a bisection to a millionth, which is
# far less than the noise of measured times.
_BISECTIONS = 20


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A bucket plan that is worth a trial.

    Args:
        choice: `PlanChoice`, bucket sizes and algorithm.
        plan: `BucketPlan` that follows from the choice.
        routes: Tuple of `AlgorithmChoice`, the all-reduce algorithm of each bucket.
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
    """Return the plans to try, which the cost model predicts to be fast.

    They are the fastest plan of each of up to four bucket sizes, and then the fastest
    plan that is not among these.

    Args:
        default: `BucketPlan` of the default, in the order of the backward pass.
        step_seconds: Float, measured time of a step with the default plan.
        algorithms: Sequence of strings or `None`, the algorithms to try, see
            `PlanChoice`.
        routes_of: Callable that takes a `PlanChoice`, or `None` for the default, and a
            `BucketPlan`, and returns the algorithm of each bucket.

    Returns:
        List of at most five `Proposal` that differ from the default and each other.
    """
    routes = tuple(routes_of(None, default))
    compute_seconds = _compute_seconds(default, routes, step_seconds)
    seen = {_signature(default, routes)}
    predicted: list[tuple[float, Proposal]] = []
    for proposal in _all_proposals(default, algorithms, routes_of):
        signature = _signature(proposal.plan, proposal.routes)
        if signature not in seen:
            seen.add(signature)
            step = _predict(proposal.plan, proposal.routes, compute_seconds)
            predicted.append((step.step_seconds, proposal))
    ranked = sorted(predicted, key=lambda pair: pair[0])
    return _select_different([proposal for _, proposal in ranked])


def _all_proposals(
    default: BucketPlan, algorithms: Sequence[str | None], routes_of: RoutesOf
) -> Iterator[Proposal]:
    """Yield a `Proposal` for each bucket size, size of the first bucket and algorithm.

    Some have the same buckets and algorithms. The arguments are those of `propose`.
    """
    entries = [entry for bucket in default for entry in bucket.entries]
    sizes = [max(default.num_bytes // part, _MIN_BUCKET_BYTES) for part in _PARTS]
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


def _select_different(ranked: Sequence[Proposal]) -> list[Proposal]:
    """Select the fastest proposal of each bucket size, and the fastest remaining one.

    The bucket sizes are at most four: those of the proposals that are fastest by
    prediction.

    Args:
        ranked: Sequence of `Proposal`, the fastest by prediction first.
    """
    sizes: set[int] = set()
    chosen: list[Proposal] = []
    for proposal in ranked:
        size = proposal.choice.bucket_bytes
        if size not in sizes and len(chosen) < MAX_PROPOSALS - 1:
            sizes.add(size)
            chosen.append(proposal)
    chosen += [proposal for proposal in ranked if proposal not in chosen][:1]
    return chosen


def _compute_seconds(
    plan: BucketPlan, routes: Sequence[AlgorithmChoice], step_seconds: float
) -> float:
    """Return the compute time of a step, given its measured time with communication.

    It is the time for which the cost model predicts that measured time.

    Args:
        plan: `BucketPlan` of the step.
        routes: Sequence of `AlgorithmChoice`, one for each bucket.
        step_seconds: Float, the measured time of a step.

    Returns:
        Float, seconds, found by bisection.
    """
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
    """Predict the times of a step with a plan, by the cost model.

    Args:
        plan: `BucketPlan`.
        routes: Sequence of `AlgorithmChoice`, one for each bucket.
        compute_seconds: Float, time of a step without communication.
    """
    buckets = [
        BucketPrediction(bucket.num_bytes, route.seconds)
        for bucket, route in zip(plan, routes, strict=True)
    ]
    return StepPrediction(tuple(buckets), compute_seconds)


def _signature(plan: BucketPlan, routes: Sequence[AlgorithmChoice]) -> tuple:
    """Return a value that is equal for plans with the same buckets and algorithms."""
    return tuple(
        (tuple(entry.name for entry in bucket.entries), str(route))
        for bucket, route in zip(plan, routes, strict=True)
    )
