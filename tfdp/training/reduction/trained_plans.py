"""Bucket plans, and options once tuned, by the variables that they are for."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.training.reduction.algorithm_choice import AlgorithmChoice
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector


@dataclasses.dataclass(frozen=True)
class _Trained:
    """Variables that were trained together.

    Paths do not tell them: two models of one process may have the same.
    """

    refs: list
    plan: BucketPlan
    routes: tuple[AlgorithmChoice, ...] = ()

    @property
    def is_alive(self) -> bool:
        return all(ref() is not None for ref in self.refs)


class TrainedPlans:
    """Plan and algorithms of each set of variables that was trained together.

    Of variables that were trained by several options, one plan for each.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[tuple[int, ...], str], _Trained] = {}

    def remember(
        self,
        variables: list[Any],
        plan: BucketPlan,
        routes: tuple[AlgorithmChoice, ...] = (),
        options: CommunicationOptions | None = None,
    ) -> None:
        """Remember the plan that variables are trained by.

        Args:
            variables: List of Keras variables.
            plan: `BucketPlan`.
            routes: Tuple of `AlgorithmChoice`, one for each bucket. Defaults to none.
            options: `CommunicationOptions` that it follows from, or `None`: any.
                Defaults to `None`.
        """
        key = tuple(map(id, variables)), repr(options)
        self._plans.pop(key, None)  # the latest comes last
        refs = [weakref.ref(variable) for variable in variables]
        self._plans[key] = _Trained(refs, plan, routes)

    def plan_of(
        self, variables: list[Any], options: CommunicationOptions | None = None
    ) -> BucketPlan | None:
        """The plan by which exactly these variables were trained, or `None`.

        Args:
            variables: List of Keras variables.
            options: `CommunicationOptions`, or `None` for the latest plan, whatever
                options it follows from. Defaults to `None`.
        """
        ids = tuple(map(id, variables))
        for key, trained in reversed(self._plans.items()):
            is_wanted = options is None or key[1] == repr(options)
            if key[0] == ids and is_wanted and trained.is_alive:
                return trained.plan
        return None

    def put_last(self, variables: Sequence[Any], options: CommunicationOptions) -> None:
        """Make the plans that follow from some options the latest of variables.

        Args:
            variables: Sequence of Keras variables, those of a model.
            options: `CommunicationOptions`.
        """
        wanted = set(map(id, variables))
        for key in list(self._plans):
            if wanted.issuperset(key[0]) and key[1] == repr(options):
                self._plans[key] = self._plans.pop(key)

    def plans_within(
        self, variables: list[Any]
    ) -> list[tuple[list[Any], BucketPlan, tuple[AlgorithmChoice, ...]]]:
        """Plans that some of these variables were trained by, the latest first."""
        wanted = set(map(id, variables))
        found = []
        for (ids, _), trained in reversed(self._plans.items()):
            if wanted.issuperset(ids) and trained.is_alive:
                members = [ref() for ref in trained.refs]
                found.append((members, trained.plan, trained.routes))
        return found


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Options in place of the strategy's, and the selector that goes with them.

    Args:
        options: `CommunicationOptions`.
        algorithm_selector: `AlgorithmSelector` of these.
        gain: String, what they have gained, or `""` where that is not known (yet).
        refs: List of weak references to the variables that they are for.
    """

    options: CommunicationOptions
    algorithm_selector: AlgorithmSelector
    gain: str
    refs: list[weakref.ref]

    @property
    def is_alive(self) -> bool:
        """Bool, whether all of the variables are still there."""
        return all(ref() is not None for ref in self.refs)
