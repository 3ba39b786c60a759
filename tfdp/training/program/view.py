"""An operation of the program as its rule sees it, and what the rule decides."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tfdp.training.program.facts import (
    Fact,
    Form,
    own_rows,
    part,
    static_sizes,
    whole,
    with_rows,
)
from tfdp.training.program.sizes import number, numbers

_Entry = TypeVar("_Entry")


def operations(names: str) -> frozenset[str]:
    """Return the types of operations that a text names."""
    return frozenset(names.split())


def table(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Return the entry of each operation, from one for all that a text names."""
    return {name: entry for names, entry in entries.items() for name in names.split()}


# The input that is the shape of the output.
_SHAPE_INPUT = {"BroadcastTo": 1, "Fill": 0, "Reshape": 1}

# Of these the output has the shape of the first input.
_LIKE_FIRST = operations("Cumprod Cumsum LogSoftmax ReverseV2 Roll Softmax")

# The shape of what these give is an input: it may have the number of rows in it.
_SHAPED_BY_VALUES = operations(
    """
    BroadcastTo Fill OneHot Pad PadV2 Range Reshape ScatterNd Slice StridedSlice
    StridedSliceGrad Tile UnsortedSegmentSum
    """
)


class CannotDivideError(Exception):
    """An operation of a step cannot be divided among replicas.

    Args:
        op: The operation.
        reason: String, what it does: a verb phrase.
        advice: String, a sentence: what to write instead.
    """

    def __init__(self, op: Any, reason: str, advice: str) -> None:
        super().__init__(f"{op.name}: {reason}")
        self.op = op
        self.reason = reason
        self.advice = advice


class Kind(enum.Enum):
    """What an operation needs of an input, see `Need`."""

    AS_HELD = "as held"
    WHOLE = "whole"
    ROWS = "rows"
    PART = "part"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True)
class Need:
    """The form that an operation needs of an input.

    Args:
        kind: `Kind`: as the replica holds it (of sizes, its own); whole (of sizes, the
            program's); own rows; a part of a sum; nothing, not even that it is made.
        axis: Int, the axis of rows.
        may_broadcast: Bool, whether an axis of one entry is left as it is.
    """

    kind: Kind
    axis: int = 0
    may_broadcast: bool = False


AS_HELD = Need(Kind.AS_HELD)
WHOLE = Need(Kind.WHOLE)
PART = Need(Kind.PART)
NOTHING = Need(Kind.NOTHING)


def rows_along(axis: int = 0, *, may_broadcast: bool = False) -> Need:
    """Return the need of own rows along an axis."""
    return Need(Kind.ROWS, axis, may_broadcast)


def need_of(fact: Fact) -> Need:
    """Return the need of an input that is to be held like this."""
    if fact.is_rows:
        return rows_along(fact.axis)
    return {Form.PART: PART, Form.WHOLE: WHOLE}.get(fact.form, AS_HELD)


@dataclasses.dataclass(frozen=True)
class Decision:
    """How an operation of the program is built on a replica.

    Args:
        needs: Sequence of `Need`, one for each input.
        outputs: Sequence of `Fact`, one for each output.
        build: Callable of the `Builder`, the operation and its inputs, which returns
            its outputs; or `None`: an operation like it. Defaults to `None`.
        is_whole: Bool, whether it runs on the whole batch since no rule divides it.
        plans: `Plan`s of the graphs of a branch or a loop. Defaults to none.
        details: Anything that `build` needs beside. Defaults to `None`.
        has_collective: Bool, whether `build` sums or gathers something itself.
    """

    needs: Sequence[Need]
    outputs: Sequence[Fact]
    build: Callable | None = None
    is_whole: bool = False
    plans: Sequence[Any] = ()
    details: Any = None
    has_collective: bool = False


class View:
    """An operation of the program, with the facts of its inputs.

    Args:
        op: `tf.Operation`.
        facts: Sequence of `Fact`, of its inputs.
        scope: `Scope` of the plan, which knows its variables.
    """

    def __init__(self, op: Any, facts: Sequence[Fact], scope: Any) -> None:
        self.op = op
        self.type = op.type
        self.facts = list(facts)
        self.scope = scope

    def __len__(self) -> int:
        return len(self.facts)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the operation."""
        try:
            return self.op.get_attr(name)
        except ValueError:
            return default

    def numbers(self, index: int) -> np.ndarray | None:
        """Return the numbers of an input, if all are known."""
        return numbers(self.facts[index].value)

    def forms(self) -> list[Form]:
        """Return the forms of the inputs."""
        return [fact.form for fact in self.facts]

    @property
    def is_free(self) -> bool:
        """Whether no size of an input but that of its rows depends on the batch."""
        return all(fact.has_free_sizes or fact.rank == 0 for fact in self.facts)

    def output_sizes(self, index: int = 0) -> Any:
        """Return the sizes of an output, as far as TensorFlow knows them."""
        return static_sizes(self.op.outputs[index], is_free=self.is_free)

    def whole_outputs(self) -> list[Fact]:
        """Return the facts of outputs that every replica has."""
        shape = self._given_shape()
        if shape is not None:
            return [whole(shape)]
        is_free = not self._is_shaped_by_values() and all(
            fact.form is not Form.SIZES
            and fact.sizes is not None
            and all(size.is_free for size in fact.sizes)
            for fact in self.facts
        )
        return [
            whole(static_sizes(tensor, is_free=is_free)) for tensor in self.op.outputs
        ]

    def _is_shaped_by_values(self) -> bool:
        """Return whether sizes of outputs are integers that are not known."""
        return self.type in _SHAPED_BY_VALUES and any(
            fact.value is None and tensor.dtype.is_integer
            for fact, tensor in zip(self.facts, self.op.inputs, strict=True)
        )

    def _given_shape(self) -> Any:
        """Return the sizes of an output whose shape is an input, if all are known."""
        if self.type in _LIKE_FIRST:
            return self.facts[0].sizes
        index = _SHAPE_INPUT.get(self.type)
        value = None if index is None else self.facts[index].value
        if value is None or number(-1) in value.ravel():
            return None
        return tuple(value)

    def part_outputs(self, sizes: Any = None) -> list[Fact]:
        """Return the facts of outputs that are parts of sums."""
        if sizes is not None:
            return [part(sizes)]
        return [part(fact.sizes) for fact in self.whole_outputs()]

    def rows_output(self, axis: int, multiple: int | None, index: int = 0) -> Fact:
        """Return the fact of an output of own rows, from what TensorFlow knows."""
        sizes = self.output_sizes(index)
        assert sizes is not None
        return own_rows(with_rows(sizes, axis, multiple), axis)

    def run_whole(self) -> Decision:
        """Return the decision that is right for any operation."""
        return Decision([WHOLE] * len(self), self.whole_outputs(), is_whole=True)
