"""Second gathers of units for the backward pass, so that none is kept until then.

    forward pass:   gather 0, 1, 2, ..., each freed when its layers have run
    backward pass:  the last unit is still in memory; gather ..., 2, 1, 0 again

The backward pass of a traced step uses tensors that the forward pass has gathered. This
file replaces these inputs by those of a second gather, which waits for the gradients of
later layers. Only casts and changes of shape are computed again.

The age of an operation is its position in the graph: an operation that is traced later
has a larger age. A gate is a list of operations that a gather waits for.

Source: Tanaka et al. 2025, https://arxiv.org/abs/2504.09983, for sharding as a pass
over the graph of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.ground._compat import graphs, programs, tensor_reads
from tfdp.training.parameters.step_gathers import (
    GatheredUnit,
    UnitGatherer,
    gather_unit,
)

# Types of operations that the backward pass repeats after it has gathered a parameter
# again. They depend on the parameter only, and cost less than keeping their outputs.
_REPEATED_OPS = frozenset(
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
# Types of operations that use only the shape of a tensor, so the tensor need not be
# kept for them until the backward pass.
_SHAPE_OPS = frozenset(("Rank", "Shape", "ShapeN", "Size"))


@dataclasses.dataclass(frozen=True)
class _Use:
    """Input of a backward operation that is a gathered parameter, or its cast.

    Args:
        op: `tf.Operation` of the backward pass.
        index: Int, position of the input among the operation's inputs.
        tensor: Tensor, the input, computed in the forward pass.
    """

    op: tf.Operation
    index: int
    tensor: tf.Tensor


class BackwardGathers:
    """Gathers again, for backward passes, the parameters freed after the forward pass.

    Args:
        step: `UnitGatherer`. The backward passes that it has recorded are taken from
            it, so that they are handled once.
    """

    def __init__(self, step: UnitGatherer) -> None:
        self._step = step
        passes = step.take_backward_passes()
        freed = [
            gathered
            for gathered in step.gathered[:-1]
            if passes and gathered.unit.options.reshard_after_forward
        ]
        found = [(gathered, list(_uses(gathered, passes))) for gathered in freed]
        self._waiting = sorted(
            ((unit, uses) for unit, uses in found if uses),
            key=lambda item: _first_age(item[1]),
        )
        self._begin = passes[0][0] if passes else 0
        self._done = 0
        # While a unit is gathered, it needs memory twice: packed and unpacked. So the
        # next gather waits for these operations, which end the latest gather.
        self._previous: list[tf.Operation] = []
        # Gathers wait for earlier reductions of gradients, so that the backward pass
        # does not run ahead of slow communication. The first `_num_awaited` reductions
        # already have a gather that waits for them.
        self._reduced: list[tf.Operation] = []
        self._num_awaited = 0

    def gather_until(self, age: int) -> None:
        """Trace second gathers of the parameters that operations up to an age use.

        They are gathered by whole units, sets of parameters that are gathered together.
        The units after them are also gathered: as many as the option `prefetch` of the
        last unit that is used.

        Collectives of one channel run in the order in which they are traced, so a
        reduction must be traced after the gathers that its gradients need.

        Args:
            age: Int, age of the latest operation: its position in the graph.
        """
        needed = sum(_first_age(uses) <= age for _, uses in self._waiting)
        if needed:
            self._gather(needed + self._prefetch(needed - 1))

    def record_reduced(self, piece: tf.Tensor) -> None:
        """Make later gathers wait until a slice of gradients has been reduced.

        Where communication is slow, the backward pass would otherwise run ahead and
        accumulate gradients in memory. A gather does not wait for the latest reduction.

        Args:
            piece: Tensor, the result of a reduce-scatter.
        """
        if piece.graph is self._step.graph:
            self._reduced.append(piece.op)

    def gather_rest(self) -> None:
        """Trace the second gathers of all parameters that are still waiting for one."""
        self._gather(len(self._waiting))

    def _gather(self, count: int) -> None:
        """Trace second gathers until the first `count` waiting units have one.

        A waiting unit is a set of parameters, gathered together, that were freed after
        the forward pass and are used by the backward pass.
        """
        for number in range(self._done, min(count, len(self._waiting))):
            gathered, uses = self._waiting[number]
            unit = gathered.unit
            # The gather waits until the backward pass is about to use an earlier unit,
            # or to begin if there is no such unit: parameters that are gathered too
            # early would only take memory.
            before = number - 1 - self._prefetch(number)
            age = self._begin
            if before >= 0:
                age = _first_age(self._waiting[before][1]) - 1
            gate = self._step.order.last_until(age)
            gate += [*self._previous, *self._take_reduced()]
            in_node = unit.options.reshard_after_forward == "node"
            pieces = gathered.pieces if in_node else None
            needed = self._step.order.last_until(_first_age(uses) - 1)
            with self._step.graph.as_default(), timing.needed_after(needed):
                values, _ = gather_unit(
                    self._step,
                    unit,
                    gathered.dtypes,
                    gate,
                    pieces,
                    label=timing.UNIT_AGAIN,
                )
                self._previous = [value.op for value in values.values()]
                recomputed = _RecomputedTensors(gathered, values)
                for use in uses:
                    tensor = recomputed.tensor(use.tensor)
                    tensor_reads.set_input(use.op, use.index, tensor)
            self._done += 1

    def _take_reduced(self) -> list[tf.Operation]:
        """Return the reductions of gradients that a new gather must wait for, once.

        The latest reduction is left out, and so are those that an earlier call has
        returned, since an earlier gather waits for them.
        """
        found = self._reduced[self._num_awaited : -1]
        self._num_awaited += len(found)
        return found

    def _prefetch(self, position: int) -> int:
        """Return how many units may be gathered ahead of use, by a unit's options.

        Args:
            position: Int, position of the unit among the waiting ones.
        """
        return self._waiting[position][0].unit.options.prefetch


class _RecomputedTensors:
    """Tensors of the forward pass, computed again from a second gather.

    Args:
        unit: `GatheredUnit` of the forward pass.
        values: Dict from the `id` of a parameter to its value in the second gather.
    """

    def __init__(self, unit: GatheredUnit, values: dict[int, tf.Tensor]) -> None:
        self._recomputed = {
            id(unit.values[key]): value for key, value in values.items()
        }

    def tensor(self, old: tf.Tensor) -> tf.Tensor:
        """Return the value of a forward tensor, computed from the second gather.

        Args:
            old: Tensor of the forward pass: a gathered parameter, or the result of
                casts and changes of shape of one, which are repeated.
        """
        if id(old) not in self._recomputed:
            op = old.op
            inputs = [self.tensor(op.inputs[0]), *op.inputs[1:]]
            copy = programs.OperationTemplate(op).build(inputs)
            self._recomputed[id(old)] = copy[old.value_index]
        return self._recomputed[id(old)]


def _uses(unit: GatheredUnit, passes: list[tuple[int, int]]) -> Iterator[_Use]:
    """Yield the inputs of operations in the backward passes that come from a unit.

    Args:
        unit: `GatheredUnit` of the forward pass.
        passes: List of pairs of ages, the positions in the graph of the operations
            before and at the end of each backward pass.

    Yields:
        `_Use`: an operation, and its input that is a value of the unit or its cast.
    """
    pending = list(unit.values.values())
    while pending:
        tensor = pending.pop()
        for op in tensor.consumers():
            age = graphs.op_age(op)
            if any(begin < age <= end for begin, end in passes):
                if op.type not in _SHAPE_OPS:
                    yield from (
                        _Use(op, index, tensor)
                        for index, source in enumerate(op.inputs)
                        if source is tensor
                    )
            elif _is_repeated(op, tensor):
                pending += op.outputs


def _is_repeated(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Return whether a forward operation on a tensor is repeated after a second gather.

    It is a cast or a change of shape whose only other inputs are constants.
    """
    first, *others = op.inputs
    is_constant = all(other.op.type == "Const" for other in others)
    return op.type in _REPEATED_OPS and first is tensor and is_constant


def _first_age(uses: list[_Use]) -> int:
    """Return the age of the earliest operation of `uses`: its position in the graph."""
    return min(graphs.op_age(use.op) for use in uses)
