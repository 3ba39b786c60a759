"""Bucket plans and tuned options, by the variables that they apply to."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.training.compression.algorithm_choice import AlgorithmChoice
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector


@dataclasses.dataclass(frozen=True)
class _TrainedSet:
    """Bucket plan and all-reduce algorithms of variables that a step trains together.

    Variables are kept as weak references, not as paths, since two models of one process
    may have variables of the same path.

    Args:
        refs: List of weak references to the variables.
        plan: `BucketPlan` of their gradients.
        routes: Tuple of `AlgorithmChoice`, one for each bucket. Defaults to none.
    """

    refs: list
    plan: BucketPlan
    routes: tuple[AlgorithmChoice, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Bool, whether all of the variables still exist."""
        return all(ref() is not None for ref in self.refs)


class TrainedPlans:
    """Plans and algorithms of the sets of variables that were trained together.

    A plan is stored when a step is traced, by the variables and the
    `CommunicationOptions` from which it follows: a model whose options were tuned has
    several. The latest one is what `communication_plan` shows.
    """

    def __init__(self) -> None:
        self._plans: dict[tuple[tuple[int, ...], str], _TrainedSet] = {}

    def remember(
        self,
        variables: list[Any],
        plan: BucketPlan,
        routes: tuple[AlgorithmChoice, ...] = (),
        options: CommunicationOptions | None = None,
    ) -> None:
        """Store the plan by which variables are trained.

        Args:
            variables: List of Keras variables.
            plan: `BucketPlan` of their gradients.
            routes: Tuple of `AlgorithmChoice`, one for each bucket. Defaults to none.
            options: `CommunicationOptions` from which the plan follows, or `None` if it
                follows from none. Defaults to `None`.
        """
        key = tuple(map(id, variables)), repr(options)
        # The latest plan must be the last one, but a dict keeps the position of a key
        # that is assigned again. So the key is removed first.
        self._plans.pop(key, None)
        refs = [weakref.ref(variable) for variable in variables]
        self._plans[key] = _TrainedSet(refs, plan, routes)

    def plan_of(
        self, variables: list[Any], options: CommunicationOptions | None = None
    ) -> BucketPlan | None:
        """Return the plan by which exactly these variables were trained, or `None`.

        Args:
            variables: List of Keras variables.
            options: `CommunicationOptions` from which the plan follows, or `None` for
                the latest plan. Defaults to `None`.
        """
        ids = tuple(map(id, variables))
        for key, trained in reversed(self._plans.items()):
            is_wanted = options is None or key[1] == repr(options)
            if key[0] == ids and is_wanted and trained.is_alive:
                return trained.plan
        return None

    def make_latest(
        self, variables: Sequence[Any], options: CommunicationOptions
    ) -> None:
        """Make the plans from some options the latest plans of a model's variables.

        `plan_of` without options and `plans_of_subsets` return the latest plans first.

        Args:
            variables: Sequence of Keras variables, those of the model.
            options: `CommunicationOptions` from which the plans follow. Without a plan
                from these options nothing changes.
        """
        wanted = set(map(id, variables))
        for key in list(self._plans):
            if wanted.issuperset(key[0]) and key[1] == repr(options):
                self._plans[key] = self._plans.pop(key)

    def plans_of_subsets(
        self, variables: list[Any]
    ) -> list[tuple[list[Any], BucketPlan, tuple[AlgorithmChoice, ...]]]:
        """Return plans of subsets of these variables, the latest first.

        Args:
            variables: List of Keras variables, those of a model.

        Returns:
            List of tuples: list of variables, their `BucketPlan`, and a tuple of
            `AlgorithmChoice`.
        """
        wanted = set(map(id, variables))
        plans = []
        for (ids, _), trained in reversed(self._plans.items()):
            if wanted.issuperset(ids) and trained.is_alive:
                members = [ref() for ref in trained.refs]
                plans.append((members, trained.plan, trained.routes))
        return plans


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Tuned options that replace the strategy's, and their selector.

    Args:
        options: `CommunicationOptions` that were tuned.
        algorithm_selector: `AlgorithmSelector` with these options.
        gain: String, description of the gain over the strategy's options, for the
            user; or `""` if it is not known (yet).
        refs: List of weak references to the variables that the options apply to.
    """

    options: CommunicationOptions
    algorithm_selector: AlgorithmSelector
    gain: str
    refs: list[weakref.ref]

    @property
    def is_alive(self) -> bool:
        """Bool, whether all of the variables still exist."""
        return all(ref() is not None for ref in self.refs)
