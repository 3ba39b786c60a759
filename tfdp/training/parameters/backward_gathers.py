"""Units gathered again for the backward pass, so that none is kept until then.

    forward pass:   gather 0, 1, 2, ..., each freed when its layers have run
    backward pass:  the last one is still there; gather ..., 2, 1, 0 again

The backward pass of a traced step has taken its inputs from the gathers of the forward
pass. Here these inputs are replaced by those of a second gather, which waits for the
gradients of the layers behind. Only casts and changes of shape are computed again.

Source: Tanaka et al. 2025, https://arxiv.org/abs/2504.09983, for sharding as a pass
over the graph of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground import _compat
from tfdp.training.parameters.step_gathers import (
    GatheredUnit,
    StepGathers,
    gather_unit,
)

# What is made of a gathered parameter alone, and costs less than keeping it.
_REPEATED = frozenset(
    (
        "Cast",
        "ExpandDims",
        "Identity",
        "Reshape",
        "Squeeze",
        "StridedSlice",
        "Transpose",
    )
)
# They need no values: a gather of the forward pass is freed all the same.
_OF_SHAPES = frozenset(("Rank", "Shape", "ShapeN", "Size"))


@dataclasses.dataclass(frozen=True)
class _Use:
    """An input of an operation of the backward pass."""

    op: tf.Operation
    index: int
    tensor: tf.Tensor


class BackwardGathers:
    """Second gathers for the backward passes that a step has traced.

    Args:
        step: `StepGathers`, whose passes are taken into account once.
    """

    def __init__(self, step: StepGathers) -> None:
        self._step = step
        passes = step.take_backward_passes()
        freed = [
            gathered
            for gathered in step.gathered[:-1]
            if gathered.unit.options.reshard_after_forward
        ]
        found = [(gathered, list(_uses(gathered, passes))) for gathered in freed]
        self._waiting = sorted(
            ((unit, uses) for unit, uses in found if uses),
            key=lambda item: _first(item[1]),
        )
        self._begin = passes[0][0] if passes else 0
        self._done = 0
        # What the gather before has made.
        self._before: list[tf.Operation] = []
        # Reduced gradients, and how many of them a gather waits for.
        self._reduced: list[tf.Operation] = []
        self._num_awaited = 0

    def up_to(self, age: int) -> None:
        """Gather what operations of at most an age use, and what is prefetched then.

        Collectives of one channel run in the order in which they are traced: what is
        reduced next must not come before a gather that it needs.
        """
        needed = sum(_first(uses) <= age for _, uses in self._waiting)
        if needed:
            self._gather(needed + self._prefetch(needed - 1))

    def note_reduced(self, piece: tf.Tensor) -> None:
        """Let later gathers wait until gradients have been reduced.

        The backward pass would run ahead where communication is slower, and pile up
        gradients. Those of the last unit are not waited for.

        Args:
            piece: Tensor, what a reduce-scatter returns.
        """
        if piece.graph is self._step.graph:
            self._reduced.append(piece.op)

    def all(self) -> None:
        """Gather the rest."""
        self._gather(len(self._waiting))

    def _gather(self, count: int) -> None:
        for number in range(self._done, min(count, len(self._waiting))):
            gathered, uses = self._waiting[number]
            unit = gathered.unit
            gate = self._gate(number - 1 - self._prefetch(number))
            gate += [*self._before, *self._take_reduced()]
            in_node = unit.options.reshard_after_forward == "node"
            pieces = gathered.pieces if in_node else None
            needed = self._step.order.last_until(_first(uses) - 1)
            with self._step.graph.as_default(), timing.needed_after(needed):
                values, _ = gather_unit(
                    self._step,
                    unit,
                    gathered.dtypes,
                    gate,
                    pieces,
                    label=timing.UNIT_AGAIN,
                )
                self._before = [value.op for value in values.values()]
                again = _Again(gathered, values)
                for use in uses:
                    _compat.set_input(use.op, use.index, again.tensor(use.tensor))
            self._done += 1

    def _take_reduced(self) -> list[tf.Operation]:
        """The reduced gradients that no gather waits for yet, but for the last ones."""
        found = self._reduced[self._num_awaited : -1]
        self._num_awaited += len(found)
        return found

    def _prefetch(self, number: int) -> int:
        return self._waiting[number][0].unit.options.prefetch

    def _gate(self, before: int) -> list[tf.Operation]:
        """What comes before the first use of a unit in the backward pass."""
        age = self._begin if before < 0 else _first(self._waiting[before][1]) - 1
        return self._step.order.last_until(age)


class _Again:
    """Tensors of the forward pass, made again of a second gather.

    Args:
        unit: `GatheredUnit` of the forward pass.
        values: Dict from the `id` of a parameter to its value, gathered again.
    """

    def __init__(self, unit: GatheredUnit, values: dict[int, tf.Tensor]) -> None:
        self._made = {id(unit.values[key]): value for key, value in values.items()}

    def tensor(self, old: tf.Tensor) -> tf.Tensor:
        if id(old) not in self._made:
            op = old.op
            inputs = [self.tensor(op.inputs[0]), *op.inputs[1:]]
            copy = _compat.OperationTemplate(op).build(inputs)
            self._made[id(old)] = copy[old.value_index]
        return self._made[id(old)]


def _uses(unit: GatheredUnit, passes: list[tuple[int, int]]) -> Iterator[_Use]:
    """What the backward passes use of a unit."""
    pending = list(unit.values.values())
    while pending:
        tensor = pending.pop()
        for op in tensor.consumers():
            age = _compat.op_age(op)
            if any(begin < age <= end for begin, end in passes):
                if op.type not in _OF_SHAPES:
                    yield from (
                        _Use(op, index, tensor)
                        for index, given in enumerate(op.inputs)
                        if given is tensor
                    )
            elif _is_repeated(op, tensor):
                pending += op.outputs


def _is_repeated(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether an operation of the forward pass is made again of a second gather."""
    first, *others = op.inputs
    is_constant = all(other.op.type == "Const" for other in others)
    return op.type in _REPEATED and first is tensor and is_constant


def _first(uses: list[_Use]) -> int:
    return min(_compat.op_age(use.op) for use in uses)
