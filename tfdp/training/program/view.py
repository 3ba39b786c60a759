"""OperationView of an operation for its rule, and the decision that the rule returns.

The view has what is known of the inputs. The decision says in which form a replica
needs each input, what is known of the outputs, and how the operation is built.
"""

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
    """Return the set of the types of operations that a text lists, split at blanks."""
    return frozenset(names.split())


def table(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Return a dict by type of operation, from keys that list several types.

    For example, `{"Add Sub": 1}` becomes `{"Add": 1, "Sub": 1}`.
    """
    return {name: entry for names, entry in entries.items() for name in names.split()}


# The input with this index is the shape of the output, so the output has the sizes that
# the plan knows of its elements. These may be multiples of the number of rows, which
# TensorFlow's static shape cannot express.
_SHAPE_INPUT = {"BroadcastTo": 1, "Fill": 0, "Reshape": 1}

# The output of these operations has the shape of the first input. The plan may know
# that shape better than TensorFlow, as multiples of the number of rows, so the output
# takes its sizes from the plan.
_LIKE_FIRST = operations("Cumprod Cumsum LogSoftmax ReverseV2 Roll Softmax")

# The output shape of these operations follows from the values of an input, so it may
# depend on the number of rows even if no input's shape does.
_SHAPED_BY_VALUES = operations(
    """
    BroadcastTo Fill OneHot Pad PadV2 Range Reshape ScatterNd Slice StridedSlice
    StridedSliceGrad Tile UnsortedSegmentSum
    """
)


class CannotDivideError(Exception):
    """Raised if an operation of a step cannot be divided among replicas.

    Args:
        op: `tf.Operation` that cannot be divided.
        reason: String, verb phrase that says what the operation does.
        advice: String, sentence that says what to write instead.
    """

    def __init__(self, op: Any, reason: str, advice: str) -> None:
        super().__init__(f"{op.name}: {reason}")
        self.op = op
        self.reason = reason
        self.advice = advice


class NeededForm(enum.Enum):
    """Form in which an operation needs an input.

    AS_IS: as the replica holds it, with sizes for its own rows. WHOLE: the tensor of
    the whole batch, with sizes for it. ROWS: the replica's own rows. PART: a partial
    sum. NOTHING: not needed at all.
    """

    AS_IS = "as is"
    WHOLE = "whole"
    ROWS = "rows"
    PART = "part"
    NOTHING = "nothing"


@dataclasses.dataclass(frozen=True)
class Need:
    """Form in which an operation needs an input, such as own rows or the whole tensor.

    Args:
        kind: `NeededForm`: as the replica holds it, with sizes for its own rows; whole,
            with sizes for the whole batch; own rows; a partial sum, which the sum over
            replicas completes; or nothing, if the input need not be computed.
        axis: Int, the axis of rows, if own rows are needed. Defaults to 0.
        may_broadcast: Bool; if true, an axis of size one is not sliced, since it
            broadcasts. Defaults to `False`.
    """

    kind: NeededForm
    axis: int = 0
    may_broadcast: bool = False


AS_IS = Need(NeededForm.AS_IS)
WHOLE = Need(NeededForm.WHOLE)
PART = Need(NeededForm.PART)
NOTHING = Need(NeededForm.NOTHING)


def rows_along(axis: int = 0, *, may_broadcast: bool = False) -> Need:
    """Return the `Need` of an operation that takes a replica's own rows along an axis.

    Args:
        axis: Int, the axis of rows. Defaults to 0.
        may_broadcast: Bool; if true, an axis of size one is not sliced, since it
            broadcasts. Defaults to `False`.
    """
    return Need(NeededForm.ROWS, axis, may_broadcast)


def need_of(fact: Fact) -> Need:
    """Return the `Need` that asks for a tensor in the form in which replicas hold it.

    It is `AS_IS` for forms that have no `Need` of their own. `fact` has the form.
    """
    if fact.is_rows:
        return rows_along(fact.axis)
    return {Form.PART: PART, Form.WHOLE: WHOLE}.get(fact.form, AS_IS)


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a replica builds an operation of the program, as decided by a rule.

    Args:
        needs: Sequence of `Need`, one for each input: the form to which a replica
            converts it.
        outputs: Sequence of `Fact`, one for each output: the form in which replicas
            hold it, and its sizes.
        build: Callable of the `Builder`, the operation and its inputs, which returns
            its outputs; or `None` to copy the operation. Defaults to `None`.
        is_whole: Bool, whether the operation runs on the whole batch since no rule
            divides it. Defaults to `False`.
        plans: Sequence of `Plan`, one for each graph of a branch, a loop or a call.
            Defaults to none.
        details: For a branch, a list of the `Need` of each result; for a loop, a list
            of bools, whether its body leaves each variable unchanged. Defaults to
            `None`.
        has_collective: Bool, whether `build` itself sums over replicas or gathers.
            Defaults to `False`.
    """

    needs: Sequence[Need]
    outputs: Sequence[Fact]
    build: Callable | None = None
    is_whole: bool = False
    plans: Sequence[Any] = ()
    details: Any = None
    has_collective: bool = False


class OperationView:
    """An operation of the program, with what is known of its inputs.

    Args:
        op: `tf.Operation` of the program.
        facts: Sequence of `Fact`, one for each input: how replicas hold it, and its
            sizes.
        scope: `ProgramProperties` of the plan, which knows its variables.
    """

    def __init__(self, op: Any, facts: Sequence[Fact], scope: Any) -> None:
        self.op = op
        self.type = op.type
        self.facts = list(facts)
        self.scope = scope

    def __len__(self) -> int:
        return len(self.facts)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute of the operation, or the default if it has none."""
        try:
            return self.op.get_attr(name)
        except ValueError:
            return default

    def numbers(self, index: int) -> np.ndarray | None:
        """Return an input as an array of numbers, or `None` unless all are known.

        `index` is the index of the input.
        """
        return numbers(self.facts[index].value)

    def forms(self) -> list[Form]:
        """Return the list of the `Form`s in which replicas hold the inputs."""
        return [fact.form for fact in self.facts]

    @property
    def is_free(self) -> bool:
        """Bool, whether at most the axis of rows of each input depends on the rows.

        That is, all other sizes are the same for any number of rows. It is `False` if
        the rank of an input is not known.
        """
        return all(fact.has_free_sizes or fact.rank == 0 for fact in self.facts)

    def output_sizes(self, index: int = 0) -> Any:
        """Return the shape of an output as a tuple of `Size`, as TensorFlow knows it.

        The result is `None` if the rank is not known, or for a list.
        """
        return static_sizes(self.op.outputs[index], is_free=self.is_free)

    def whole_outputs(self) -> list[Fact]:
        """Return what is known of the outputs if every replica has the whole inputs.

        Returns:
            List of `Fact`, one for each output: it is whole like the inputs, and has
            the sizes that follow from them or that TensorFlow knows.
        """
        shape = self._shape_from_input()
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
        """Return whether an input of unknown value determines the outputs' shape."""
        return self.type in _SHAPED_BY_VALUES and any(
            fact.value is None and tensor.dtype.is_integer
            for fact, tensor in zip(self.facts, self.op.inputs, strict=True)
        )

    def _shape_from_input(self) -> Any:
        """Return the shape of the output if an input determines it, or `None`.

        Either the operation, such as `Softmax`, keeps the shape of its first input; or
        an input is the shape of the output, as in `Reshape`, and has known elements
        without a -1.

        Returns:
            Tuple of `Size`, or `None`.
        """
        if self.type in _LIKE_FIRST:
            return self.facts[0].sizes
        index = _SHAPE_INPUT.get(self.type)
        value = None if index is None else self.facts[index].value
        if value is None or number(-1) in value.ravel():
            return None
        return tuple(value)

    def part_outputs(self, sizes: Any = None) -> list[Fact]:
        """Return a list of a `Fact` for each output, of the form of a partial sum.

        Args:
            sizes: Tuple of `Size`, shape of the only output, or `None` for the shapes
                that the inputs and TensorFlow determine. Defaults to `None`.
        """
        if sizes is not None:
            return [part(sizes)]
        return [part(fact.sizes) for fact in self.whole_outputs()]

    def rows_output(self, axis: int, multiple: int | None, index: int = 0) -> Fact:
        """Return the `Fact` of an output of known rank that is sharded by rows.

        Args:
            axis: Int, the axis of rows of the output.
            multiple: Int, number of entries per row, or `None` if not known.
            index: Int, index of the output. Defaults to 0.
        """
        sizes = self.output_sizes(index)
        assert sizes is not None
        return own_rows(with_rows(sizes, axis, multiple), axis)

    def run_whole(self) -> Decision:
        """Decide to run the operation on whole inputs, which is always correct."""
        return Decision([WHOLE] * len(self), self.whole_outputs(), is_whole=True)
