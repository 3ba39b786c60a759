"""Options of local steps, and the checks of what a user has given."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfdp.base.param_groups import is_multi
from tfdp.cluster.words import counted

SCOPES = ("node", "replica")


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """How the replicas go on from what each has learned.

    Args:
        optimizer: Keras optimizer of the outer step, a template that is not built.
        scope: String, who trains synchronously between two outer steps: those of a
            `"node"`, or nobody, each `"replica"` by itself.
        fragments: Int, parts of the weights that are exchanged one after the other.

    Raises:
        ValueError: If one of them is something else.
    """

    optimizer: Any
    scope: str = "node"
    fragments: int = 1

    def __post_init__(self) -> None:
        is_keras = isinstance(self.optimizer, keras.optimizers.Optimizer)
        wraps = hasattr(self.optimizer, "inner_optimizer") or is_multi(self.optimizer)
        if not is_keras or wraps:
            raise ValueError(
                "`outer_optimizer` must be a Keras optimizer, and no wrapper of "
                f"others. Received: outer_optimizer={self.optimizer!r}"
            )
        if self.optimizer.built:
            raise ValueError(
                "`outer_optimizer` has been built for other variables already. Give a "
                f"new one. Received: {self.optimizer.name}"
            )
        if self.scope not in SCOPES:
            raise ValueError(
                f'`scope` must be "node" or "replica". Received: scope={self.scope!r}'
            )
        check_count("fragments", self.fragments, "parts of the weights")


@dataclasses.dataclass(frozen=True)
class LocalStepsOptions:
    """When replicas that step alone meet, and what they do then.

    Args:
        sync_every: Int, updates from one exchange to the next.
        outer: `OuterOptions`, or `None`: weights and slots are averaged. Defaults to
            `None`.

    Raises:
        ValueError: If `sync_every` is no integer of at least 1, or too small for the
            fragments.
    """

    sync_every: int
    outer: OuterOptions | None = None

    def __post_init__(self) -> None:
        check_count("sync_every", self.sync_every, "updates from one exchange on")
        if self.num_fragments > self.sync_every:
            raise ValueError(
                "`fragments` must be at most `sync_every`: one is exchanged after an "
                f"update. Received: fragments={self.num_fragments}, "
                f"sync_every={self.sync_every}"
            )

    @property
    def num_fragments(self) -> int:
        """Int, parts of the weights that are exchanged one after the other."""
        return 1 if self.outer is None else self.outer.fragments

    @property
    def offsets(self) -> list[int]:
        """List of ints: the updates, modulo `sync_every`, after which each is due."""
        count = self.num_fragments
        return [
            (i + 1) * self.sync_every // count % self.sync_every for i in range(count)
        ]

    def fragments_of(self, sizes: list[int]) -> list[list[int]]:
        """Cut variables into fragments of about equal size, in their order.

        Args:
            sizes: List of ints, the elements of each variable.

        Returns:
            List of lists of positions, one for each fragment, none of them empty.

        Raises:
            ValueError: If there are fewer variables than fragments.

        Example:

        >>> options = OuterOptions(keras.optimizers.SGD(0.7), fragments=2)
        >>> LocalStepsOptions(10, options).fragments_of([6, 4, 2, 4, 4])
        [[0, 1], [2, 3, 4]]
        """
        count = self.num_fragments
        if len(sizes) < count:
            raise ValueError(
                "`fragments` must be at most the number of trained variables. "
                f"Received: fragments={count}, {counted(len(sizes), 'variable')}"
            )
        fragments: list[list[int]] = [[]]
        done, total = 0, sum(sizes)
        for index, size in enumerate(sizes):
            is_full = done * count >= len(fragments) * total
            must_begin = len(sizes) - index == count - len(fragments)
            if fragments[-1] and len(fragments) < count and (is_full or must_begin):
                fragments.append([])
            fragments[-1].append(index)
            done += size
        return fragments


def check_count(name: str, value: object, what: str, least: int = 1) -> None:
    """Check an integer of a user's.

    Args:
        name: String, of the argument.
        value: What was given.
        what: String, what it counts.
        least: Int, the smallest one. Defaults to 1.

    Raises:
        ValueError: If it is no integer, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, {what}. "
            f"Received: {name}={value!r}"
        )
