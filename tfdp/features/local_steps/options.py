"""Options of local steps, and checks of a user's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdp.ground.arguments import (
    check_choice,
    checked_bool,
    checked_integer,
    checked_number,
)
from tfdp.ground.base.param_groups import is_multi
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.text import pluralize

SCOPES = ("node", "replica")


def _check(
    options: Any, name: str, check: Callable[..., Any], *arguments: Any, **limits: float
) -> None:
    """Check a field of frozen options, and store the checked value.

    Args:
        options: `OuterOptions` or `LocalStepsOptions`.
        name: String, name of the field.
        check: Callable that takes the name, the value, `arguments` and `limits`, and
            returns the checked value, or raises an error.
        *arguments: Further arguments of `check`.
        **limits: Keyword arguments of `check`, such as bounds of the value.
    """
    value = check(name, getattr(options, name), *arguments, **limits)
    object.__setattr__(options, name, value)


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """Options of outer steps, which combine the weights of replicas or nodes.

    Args:
        optimizer: Keras optimizer of the outer step, a template that is not built.
        scope: String, what trains synchronously between two outer steps: `"node"`, all
            replicas of a node; or `"replica"`, each replica alone.
        fragments: Int, parts of the weights that are exchanged one after another.
        compression: Compression of exchanges between nodes, as in
            `CommunicationOptions`, or `None`.
        delay: Int, inner updates between the start of an exchange and its outer step.
        mixing: Float from 0 to 1, the fraction of its local weights that a replica
            keeps in a delayed outer step.
        scales_by_staleness: Bool, whether the gradient of a late outer step is scaled
            down.
        min_participants: Int, the number of workers that an exchange needs, or `None`:
            all.
        patience_seconds: Float, how long an exchange waits for more workers than
            `min_participants`.

    Raises:
        ValueError: If an argument is invalid.
    """

    optimizer: Any
    scope: str = "node"
    fragments: int = 1
    compression: Any = None
    delay: int = 0
    mixing: float = 0.5
    scales_by_staleness: bool = False
    min_participants: int | None = None
    patience_seconds: float = 1.0

    def __post_init__(self) -> None:
        is_keras = isinstance(self.optimizer, keras.optimizers.Optimizer)
        wraps = hasattr(self.optimizer, "inner_optimizer") or is_multi(self.optimizer)
        if not is_keras or wraps:
            raise ValueError(
                "`outer_optimizer` must be a Keras optimizer, not a wrapper of others. "
                f"Received: outer_optimizer={self.optimizer!r}"
            )
        if self.optimizer.built:
            raise ValueError(
                "`outer_optimizer` has been built for other variables already. Give a "
                f"new one. Received: {self.optimizer.name}"
            )
        self._check_features()
        check_choice("scope", self.scope, SCOPES)
        _check(self, "fragments", checked_integer, 1, "parts of the weights")
        _check(self, "delay", checked_integer, 0, "inner updates")
        self._check_compression()
        _check(self, "mixing", checked_number, "a number from 0 to 1", least=0, most=1)
        _check(self, "patience_seconds", checked_number, "a number of seconds", least=0)
        by_staleness = checked_bool("scale_by_staleness", self.scales_by_staleness)
        object.__setattr__(self, "scales_by_staleness", by_staleness)
        if self.min_participants is not None:
            _check(self, "min_participants", checked_integer, 1, "workers")
            self._check_rounds()

    def _check_features(self) -> None:
        """Raise `ValueError` if the outer optimizer has an option that is excluded.

        These are `use_ema`, `gradient_accumulation_steps` and `loss_scale_factor`.
        """
        names = ("use_ema", "gradient_accumulation_steps", "loss_scale_factor")
        if used := [name for name in names if getattr(self.optimizer, name, None)]:
            raise ValueError(
                "`outer_optimizer` makes one update for each exchange, and all "
                "replicas continue from its result. Remove "
                f"{', '.join(f'`{name}`' for name in used)}."
            )

    def _check_rounds(self) -> None:
        """Raise `ValueError` if another option excludes `min_participants`.

        It needs a `delay`, one fragment, and no compression.
        """
        if not self.delay or self.fragments > 1 or self.compression is not None:
            raise ValueError(
                "`min_participants` needs a `delay` of at least 1, and is for "
                "exchanges of one fragment that is not compressed. Received: "
                f"delay={self.delay}, fragments={self.fragments}, "
                f"compression={self.compression!r}"
            )

    def _check_compression(self) -> None:
        """Raise `ValueError` unless `compression` is valid, and not a mapping."""
        if isinstance(self.compression, Mapping):
            raise ValueError(
                "`compression` of `DiLoCo` applies between nodes: give one string or "
                "one `tfdp.compression.Compressor`. Received: "
                f"compression={dict(self.compression)!r}"
            )
        CommunicationOptions(compression=self.compression)

    @property
    def compression_by_level(self) -> Any:
        """Value of `compression` for `CommunicationOptions`.

        With the scope `"node"` it is `{"outer": compression}`, between nodes only;
        without compression, or with the scope `"replica"`, `compression` itself.
        """
        if self.compression is None or self.scope == "replica":
            return self.compression
        return {"outer": self.compression}


@dataclasses.dataclass(frozen=True)
class LocalStepsOptions:
    """Interval and kind of the exchanges of local steps.

    Args:
        sync_every: Int, updates from one exchange to the next.
        outer: `OuterOptions` of outer steps, or `None`: weights and slots are averaged.
            Defaults to `None`.
        is_dynamic: Bool, whether slower workers make fewer inner steps. Defaults to
            `False`.

    Raises:
        ValueError: If `sync_every` is not an integer of at least 1, or too small for
            the fragments and the delay.
    """

    sync_every: int
    outer: OuterOptions | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        what = "the number of updates from one exchange to the next"
        _check(self, "sync_every", checked_integer, 1, what)
        is_dynamic = checked_bool("dynamic_steps", self.is_dynamic)
        object.__setattr__(self, "is_dynamic", is_dynamic)
        if self.num_fragments > self.sync_every:
            raise ValueError(
                "`fragments` must be at most `sync_every`: one fragment is exchanged "
                f"after an update. Received: fragments={self.num_fragments}, "
                f"sync_every={self.sync_every}"
            )
        if self.delay and self.delay >= self.sync_every // self.num_fragments:
            raise ValueError(
                "`delay` must be less than `sync_every / fragments`: an exchange ends "
                f"before the next one begins. Received: delay={self.delay}, "
                f"sync_every={self.sync_every}, fragments={self.num_fragments}"
            )

    @property
    def scope(self) -> str:
        """String, `"node"` or `"replica"`: what trains synchronously.

        Without `outer` it is `"replica"`.
        """
        return "replica" if self.outer is None else self.outer.scope

    @property
    def delay(self) -> int:
        """Int, inner updates between the start of an exchange and its outer step.

        Without `outer` it is 0.
        """
        return 0 if self.outer is None else self.outer.delay

    @property
    def num_fragments(self) -> int:
        """Int, parts of the weights that are exchanged one after another.

        Without `outer` it is 1.
        """
        return 1 if self.outer is None else self.outer.fragments

    @property
    def offsets(self) -> list[int]:
        """List of ints, for each fragment the update after which it is sent.

        Updates are counted modulo `sync_every`.
        """
        count = self.num_fragments
        return [
            (i + 1) * self.sync_every // count % self.sync_every for i in range(count)
        ]

    def fragments_of(self, sizes: list[int]) -> list[list[int]]:
        """Divide variables into fragments of about equal size, in their order.

        Args:
            sizes: List of ints, the number of elements of each variable.

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
                f"Received: fragments={count}, {pluralize(len(sizes), 'variable')}"
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
