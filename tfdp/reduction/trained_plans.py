"""Bucket plans by the variables that were trained with them."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from tfdp.plans.buckets import BucketPlan
from tfdp.reduction.algorithm_choice import AlgorithmChoice


@dataclasses.dataclass(frozen=True)
class _Trained:
    """Variables that were trained together.

    Paths do not tell them: two models of one process may have the same.
    """

    refs: list
    plan: BucketPlan
    routes: tuple[AlgorithmChoice, ...] = ()


class TrainedPlans:
    """Plan and algorithms of each set of variables that was trained together."""

    def __init__(self) -> None:
        self._plans: dict[tuple[int, ...], _Trained] = {}

    def remember(
        self,
        variables: list[Any],
        plan: BucketPlan,
        routes: tuple[AlgorithmChoice, ...] = (),
    ) -> None:
        key = tuple(map(id, variables))
        self._plans.pop(key, None)  # the latest comes last
        refs = [weakref.ref(variable) for variable in variables]
        self._plans[key] = _Trained(refs, plan, routes)

    def plan_of(self, variables: list[Any]) -> BucketPlan | None:
        """The plan by which exactly these variables were trained, or `None`."""
        trained = self._plans.get(tuple(map(id, variables)))
        alive = trained is not None and all(ref() is not None for ref in trained.refs)
        return trained.plan if trained is not None and alive else None

    def plans_within(
        self, variables: list[Any]
    ) -> list[tuple[list[Any], BucketPlan, tuple[AlgorithmChoice, ...]]]:
        """Plans that some of these variables were trained by, the latest first."""
        wanted = set(map(id, variables))
        found = []
        for key, trained in reversed(self._plans.items()):
            members = [ref() for ref in trained.refs]
            if wanted.issuperset(key) and all(m is not None for m in members):
                found.append((members, trained.plan, trained.routes))
        return found
