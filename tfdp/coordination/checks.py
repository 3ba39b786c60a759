"""Workers compare what has to be alike before they wait for each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from tfdp.coordination.worker_group import WorkerGroup
from tfdp.plans.buckets import BucketPlan

_AUTO_NUMBER = re.compile(r"_\d+(?=/|:|$)")


def check_same_variables(
    worker_group: WorkerGroup, topic: str, variables: Sequence[Any], verb: str
) -> None:
    """Raises on every worker if they do not have the same variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, where in the program this is.
        variables: Sequence of variables; order counts.
        verb: String, what a worker does with them, such as `"trains"`.

    Raises:
        ValueError: Naming the first variable that differs.
    """
    if worker_group.num_workers == 1:
        return
    rows = [_row(variable) for variable in variables]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    same, _ = worker_group.same(topic, digest)
    if same:
        return
    described = [_describe(variable) for variable in variables]
    texts = worker_group.all_gather(
        f"{topic}: variables", json.dumps([rows, described])
    )
    tables = [json.loads(text) for text in texts]
    worker_group.leave()
    raise ValueError(_first_difference(tables, verb))


def check_same_plan(worker_group: WorkerGroup, plan: BucketPlan) -> None:
    """Raises on every worker if they would reduce gradients in other buckets.

    Workers with the same variables could still call the layers in another order; then
    the sums would be of gradients of different variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        plan: `BucketPlan`, this worker's.

    Raises:
        ValueError: Naming the first gradient that is in another place.
    """
    topic = "the buckets of the first step"
    same, _ = worker_group.same(topic, plan.fingerprint)
    if same:
        return
    order = [
        [bucket, index, entry.name]
        for bucket, members in enumerate(plan)
        for index, entry in zip(members.indices, members.entries, strict=True)
    ]
    texts = worker_group.all_gather(f"{topic}: gradients", json.dumps(order))
    worker_group.leave()
    raise ValueError(_first_other_place([json.loads(text) for text in texts]))


def _first_other_place(orders: list) -> str:
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


def _first_difference(tables: list, verb: str) -> str:
    reference_rows, reference = tables[0]
    for rank, (rows, described) in enumerate(tables[1:], start=1):
        for index in range(max(len(rows), len(reference_rows))):
            own = rows[index] if index < len(rows) else None
            first = reference_rows[index] if index < len(reference_rows) else None
            if own == first:
                continue
            ours = described[index] if own else "nothing"
            theirs = reference[index] if first else "nothing"
            return (
                "Workers have different models. Build the same one on every "
                f"worker. First difference, variable {index}: worker 0 {verb} "
                f"{theirs}, worker {rank} {verb} {ours}."
            )
    return "Workers have different models. Build the same one on every worker."


def _row(variable: Any) -> list:
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
