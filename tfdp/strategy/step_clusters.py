"""The compiled part of a step cut into several XLA clusters at the ends of buckets.

One cluster gives all gradients at its end. Of several, each gives those of its buckets,
which are reduced while the next one computes. A replica's traced function, whose
operations lie in an order in which they can run, is cut into ranges; each is compiled
as a function of its own, whose arguments are what earlier ranges have made.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.base import xla
from tfdp.base.deferred_updates import Update
from tfdp.options import CommunicationOptions
from tfdp.plans.buckets import BucketPlan
from tfdp.reduction.fusion import make_plan

_READS = ("ReadVariableOp", "ResourceGather")


def cut_at_buckets(
    concrete: Any, update: Update, options: CommunicationOptions
) -> tuple[Any, int]:
    """Cut a traced part of a step at the ends of buckets.

    Args:
        concrete: Concrete function of a replica's step, which returns its outputs and
            the gradients of its updates.
        update: `Update`, the only one.
        options: `CommunicationOptions`: the buckets, and how many clusters.

    Returns:
        Tuple of what is called in the place of `concrete`, and the number of clusters:
        less than asked for where there are fewer buckets.
    """
    plan, gradients = _plan_of(update, options)
    ends = cluster_ends(plan, gradients, options.xla_clusters)
    function = _Cut(concrete, tuple(ends), tuple(update.gradients))
    return function, len(ends) + 1


def _plan_of(
    update: Update, options: CommunicationOptions
) -> tuple[BucketPlan, list[tf.Tensor]]:
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
