"""Consistency checks between workers, before collectives that would hang."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.plans.buckets import BucketPlan

# Also within the name of a slot, which holds that of its variable.
_AUTO_NUMBER = re.compile(r"_\d+(?=[/:_]|$)")


def check_same_variables(
    worker_group: WorkerGroup, topic: str, variables: Sequence[Any], verb: str
) -> None:
    """Raise on every worker if they do not have the same variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the point of the program, for error messages.
        variables: Sequence of variables; order counts.
        verb: String, what a worker does with them, such as `"trains"`.

    Raises:
        ValueError: Naming the first variable that differs.
    """
    if worker_group.num_workers == 1:
        return
    signatures = [signature_of(variable) for variable in variables]
    digest = hashlib.sha256(json.dumps(signatures).encode()).hexdigest()
    same, _ = worker_group.all_equal(topic, digest)
    if same:
        return
    descriptions = [_describe(variable) for variable in variables]
    texts = worker_group.all_gather(
        f"{topic}: variables", json.dumps([signatures, descriptions])
    )
    worker_group.leave()
    raise ValueError(_variable_difference([json.loads(text) for text in texts], verb))


def created_alone(rank: int, line: str, signatures: list[list]) -> str:
    """Say that another worker has left a scope in which this one creates variables.

    Args:
        rank: Int, the other worker.
        line: String, that of the scope.
        signatures: List of this worker's variables, see `signature_of`; one at least.
    """
    name, shape, dtype = signatures[0]
    return (
        f"Worker {rank} has left the scope of {line} without the variables that this "
        f"worker creates there, first {name!r} with shape {tuple(shape)} and dtype "
        f"{dtype}. Build the same model on every worker, and outside of "
        "`strategy.scope()` what one of them needs alone."
    )


def check_same_plan(worker_group: WorkerGroup, plan: BucketPlan) -> None:
    """Raise on every worker if their bucket plans differ.

    Workers with the same variables could still call the layers in another order; then
    the sums would be of gradients of different variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        plan: `BucketPlan`, this worker's.

    Raises:
        ValueError: Naming the first gradient in another position.
    """
    topic = "the buckets of the first step"
    same, _ = worker_group.all_equal(topic, plan.fingerprint)
    if same:
        return
    order = [
        [bucket, index, entry.name]
        for bucket, members in enumerate(plan)
        for index, entry in zip(members.indices, members.entries, strict=True)
    ]
    texts = worker_group.all_gather(f"{topic}: gradients", json.dumps(order))
    worker_group.leave()
    raise ValueError(_order_difference([json.loads(text) for text in texts]))


def check_same_program(
    worker_group: WorkerGroup,
    topic: str,
    conversions: list[list[str]],
    signatures: list[str],
    describe: Callable[[int], str],
    available: int | None,
) -> int | None:
    """Raise on every worker if their steps differ in what they compute.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the step, for error messages.
        conversions: List, for each tensor of the step that replicas put together, of
            what is compared and of the operation that needs it.
        signatures: List of strings, of each operation. Their order may differ.
        describe: Callable of a position there, which returns a description.
        available: Int, bytes of memory that this worker can get, or `None`.

    Returns:
        Int, the least memory of any worker, or `None` where it is not known.

    Raises:
        ValueError: Naming the first operation that differs.
    """
    if worker_group.num_workers == 1:
        return available
    compared = json.dumps([[what for what, _ in conversions], sorted(signatures)])
    digest = hashlib.sha256(compared.encode()).hexdigest()
    texts = worker_group.all_gather(topic, json.dumps([digest, available]))
    found = [json.loads(text) for text in texts]
    if len({own for own, _ in found}) == 1:
        return min((n for _, n in found if n is not None), default=None)
    counts = collections.Counter(signatures)
    message = json.dumps([conversions, counts])
    texts = worker_group.all_gather(f"{topic}: operations", message)
    steps, all_counts = zip(*map(json.loads, texts), strict=True)
    if (difference := _step_difference(topic, steps)) is not None:
        worker_group.leave()
        raise ValueError(difference)
    # As many conversions: then operations differ, on some worker from the first one's.
    rank = next(r for r, others in enumerate(all_counts) if others != all_counts[0])
    compared = all_counts[0 if worker_group.rank else rank]
    own = next(
        (i for i, s in enumerate(signatures) if counts[s] > compared.get(s, 0)), None
    )
    operations = worker_group.all_gather(
        f"{topic}: first difference", "nothing" if own is None else describe(own)
    )
    worker_group.leave()
    raise ValueError(
        f"Workers would compute different things in {topic}. {_LET_NOTHING_CHOOSE} "
        f"First operation that differs: {operations[0]} on worker 0, "
        f"{operations[rank]} on worker {rank}."
    )


_LET_NOTHING_CHOOSE = (
    "Let nothing that differs between workers, such as a rank or Python's `random`, "
    "choose what a step computes."
)


def _step_difference(topic: str, steps: Sequence[list]) -> str | None:
    """Format the error message of workers that would wait for each other, if any."""
    text = (
        f"Workers would wait for each other in {topic}, which differs between them. "
        f"{_LET_NOTHING_CHOOSE}"
    )
    nothing = [None, "nothing"]
    for rank, step in enumerate(steps[1:], start=1):
        for first, own in itertools.zip_longest(steps[0], step, fillvalue=nothing):
            if first[0] != own[0]:
                return (
                    f"{text} First operation that differs: {first[1]} on worker 0, "
                    f"{own[1]} on worker {rank}."
                )
    return None


def _order_difference(orders: list) -> str:
    """Format the error message of bucket plans in different orders."""
    text = (
        "Workers would reduce the gradients of a model in different orders. Call its "
        "layers in the same order on every worker."
    )
    for rank, order in enumerate(orders[1:], start=1):
        for position, (first, own) in enumerate(zip(orders[0], order, strict=False)):
            if first[:2] != own[:2]:
                return (
                    f"{text} First difference, gradient {position}: that of "
                    f"{first[2]!r} on worker 0, of {own[2]!r} on worker {rank}."
                )
    return text


def _variable_difference(models: list, verb: str) -> str:
    """Format the error message of workers with different variables.

    Args:
        models: List, for each worker the signatures and the descriptions of its
            variables.
        verb: String, see `check_same_variables`.
    """
    text = "Workers have different models. Build the same one on every worker."
    if verb == "creates":
        text = (
            "Workers have different models. Build the same one on every worker, and "
            "outside of `strategy.scope()` what one of them needs alone."
        )
    first_signatures, first_descriptions = models[0]
    for rank, (signatures, descriptions) in enumerate(models[1:], start=1):
        for index in range(max(len(signatures), len(first_signatures))):
            own = signatures[index] if index < len(signatures) else None
            first = first_signatures[index] if index < len(first_signatures) else None
            if own == first:
                continue
            ours = descriptions[index] if own else "nothing"
            theirs = first_descriptions[index] if first else "nothing"
            return (
                f"{text} First difference, variable {index}: worker 0 {verb} "
                f"{theirs}, worker {rank} {verb} {ours}."
            )
    return text


def signature_of(variable: Any) -> list:
    """Return the name, shape and dtype by which workers compare a variable."""
    # Automatic numbers differ when a worker has built another model before.
    return [_AUTO_NUMBER.sub("", _name(variable)), *_type(variable)]


def _describe(variable: Any) -> str:
    shape, dtype = _type(variable)
    return f"{_name(variable)!r} with shape {tuple(shape)} and dtype {dtype}"


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def _type(variable: Any) -> tuple[list, str]:
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return list(variable.shape), str(dtype)
