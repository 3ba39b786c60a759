"""A step's compiled part cut into several XLA clusters at the ends of buckets.

tfdp compiles it as one. This is for measuring what several would bring: a replica's
traced function, whose operations lie in an order in which they can run, is cut into
ranges; each is compiled as a function of its own, whose arguments are what earlier
ranges have made.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

from tfdp import _compat
from tfdp.base import xla
from tfdp.plans.buckets import BucketPlan
from tfdp.reduction.fusion import make_plan
from tfdp.strategy.compiled_step import CompiledStep

_READS = ("ReadVariableOp", "ResourceGather")


@contextlib.contextmanager
def cutting(wanted: dict[Any, int]) -> Iterator[dict[Any, int]]:
    """Cut the compiled part of the steps of models that are traced meanwhile.

    The update is not in it, not on one replica either.

    Args:
        wanted: Dict from a Keras model to its number of clusters.

    Yields:
        Dict from a Keras model to the number that it has got: less, where it has fewer
        buckets.
    """
    found: dict[Any, int] = {}
    trace = CompiledStep._trace  # noqa: SLF001 tfdp itself has no use for a cut

    def cut(self: CompiledStep, *args: Any, **options: Any) -> Any:
        if self.loop.model not in wanted:
            return trace(self, *args, **options)
        traced = trace(self, *args, **{**options, "is_whole": False})
        if not traced.updates:
            return traced
        (update,) = traced.updates
        plan, gradients = _plan_of(update, self.strategy.extended.options)
        ends = cluster_ends(plan, gradients, wanted[self.loop.model])
        found[self.loop.model] = len(ends) + 1
        function = _Cut(traced.function, tuple(ends), tuple(update.gradients))
        return dataclasses.replace(traced, function=function)

    with mock.patch.object(CompiledStep, "_trace", cut):
        yield found


def _plan_of(update: Any, options: Any) -> tuple[BucketPlan, list[tf.Tensor]]:
    gradients = [own for own in update.gradients if tf.is_tensor(own)]
    names = [str(index) for index in range(len(gradients))]
    return make_plan(gradients, names, options), gradients


def cluster_ends(
    plan: BucketPlan, gradients: Sequence[tf.Tensor], num_clusters: int
) -> list[int]:
    """Choose where clusters end: at buckets' ends, with about as many bytes in each.

    Args:
        plan: `BucketPlan` of the gradients.
        gradients: Sequence of tensors of a traced function.
        num_clusters: Int, at least one.

    Returns:
        Sorted list of positions of operations, one less than there are clusters.
    """
    ready = [max(_compat.op_position(gradients[i]) for i in b.indices) for b in plan]
    sums = [sum(b.num_bytes for b in plan.buckets[: n + 1]) for n in range(len(plan))]
    chosen = set()
    for part in range(1, num_clusters):
        wanted = plan.num_bytes * part / num_clusters
        chosen.add(min(range(len(plan)), key=lambda n: abs(sums[n] - wanted)))
    return sorted({ready[n] for n in chosen} - {max(ready)})


@dataclasses.dataclass(frozen=True)
class _Cut:
    """What is called in place of the one concrete function."""

    concrete: Any
    ends: tuple[int, ...]
    gradients: tuple

    def __call__(self, args: tuple, numbers: list) -> Any:
        graph = self.concrete.graph
        given = [x for x in tf.nest.flatten((args, numbers)) if tf.is_tensor(x)]
        outer = [*given, *self.concrete.captured_inputs]
        values = {
            inside.ref(): out for inside, out in zip(graph.inputs, outer, strict=True)
        }
        outputs, _ = graph.structured_outputs
        results = (outputs, [list(self.gradients)])
        flat = tf.nest.flatten(results, expand_composites=True)
        made = [_made(x) for x in flat]
        _run_ranges(graph, self.ends, [x for x in made if tf.is_tensor(x)], values)
        back = [values[x.ref()] if tf.is_tensor(x) else x for x in made]
        return tf.nest.pack_sequence_as(results, back, expand_composites=True)


def _made(tensor: Any) -> Any:
    """The tensor that an output of a function is a copy of, made at its end."""
    if tf.is_tensor(tensor) and tensor.op.type == "Identity":
        return tensor.op.inputs[0]
    return tensor


def _run_ranges(
    graph: Any, ends: tuple[int, ...], results: Sequence[tf.Tensor], values: dict
) -> None:
    """Run a graph's operations in ranges, and note what others need in `values`."""
    ranges: list[list[tf.Operation]] = [[] for _ in range(len(ends) + 1)]
    for op in graph.get_operations():
        if op.type != "Placeholder":
            ranges[bisect.bisect_left(ends, _compat.op_age(op))].append(op)
    place = {op: number for number, own in enumerate(ranges) for op in own}
    repeated = _repeated(place)
    last = {x.ref() for x in results}
    for number, own in enumerate(ranges):
        needed = {
            x.ref(): x
            for op in own
            for x in op.inputs
            if place.get(x.op, number) < number and x.op not in repeated
        }
        later = {x.ref() for op in place if place[op] > number for x in op.inputs}
        kept = [
            x
            for op in own
            for x in op.outputs
            if x.ref() in last or (x.ref() in later and op not in repeated)
        ]
        new = _compiled(own, list(needed.values()), kept, values)
        values.update({x.ref(): out for x, out in zip(kept, new, strict=True)})


def _repeated(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """What a range does again: constants, and reads of what the step does not change.

    They are cheaper to have again than to hand over: weights would be copied.
    """
    changed = {
        x.ref()
        for op in operations
        for x in op.inputs
        if x.dtype == tf.resource and op.type not in _READS
    }
    return {
        op
        for op in operations
        if op.type == "Const"
        or (op.type == "ReadVariableOp" and op.inputs[0].ref() not in changed)
    }


def _compiled(
    operations: Sequence[tf.Operation],
    needed: list[tf.Tensor],
    kept: list[tf.Tensor],
    values: dict,
) -> list:
    """Call a compiled function of copies of operations."""

    def function(arguments: list[tf.Tensor]) -> list[tf.Tensor]:
        inside = {x.ref(): own for x, own in zip(needed, arguments, strict=True)}
        copies: dict[tf.Operation, tf.Operation] = {}

        def copy(op: tf.Operation) -> None:
            inputs = [value(x) for x in op.inputs]
            before = [copies[each] for each in op.control_inputs if each in copies]
            with tf.control_dependencies(before):
                new = _compat.copy_of_operation(op, inputs)
            inside.update({x.ref(): y for x, y in zip(op.outputs, new, strict=True)})
            if new:
                copies[op] = new[0].op

        def value(x: tf.Tensor) -> Any:
            if x.ref() not in inside:
                if x.op.type == "Placeholder":
                    return values[x.ref()]
                copy(x.op)
            return inside[x.ref()]

        for op in operations:
            copy(op)
        return [inside[x.ref()] for x in kept]

    given = [values[x.ref()] for x in needed]
    return xla.trace(function, (given,))(given)
