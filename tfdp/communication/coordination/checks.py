"""Comparisons between workers, before collectives that would hang or sum wrongly.

Workers compare their set-up after all have joined, variables when they are created and
trained, and the buckets and operations of a first step, as `facts` describes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.cluster import topology_of
from tfdp.communication.coordination.facts import SharedFact, compare
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground._compat import runtime
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.ground.plans.topology import Topology

# Number that Keras appends to a name. It depends on the models that a worker has built
# before, so names are compared without it. In the name of an optimizer's slot, more
# text follows it.
_AUTO_NUMBER = re.compile(r"_\d+(?=[/:_]|$)")
_LET_NOTHING_CHOOSE = (
    "What a step computes must not depend on anything that differs between workers, "
    "such as a rank or Python's `random`."
)


def check_same_setup(
    worker_group: WorkerGroup,
    devices: Sequence[str],
    facts: dict[str, str],
) -> list[str]:
    """Raise on every worker if device counts, versions or options differ.

    Args:
        worker_group: `WorkerGroup`.
        devices: Sequence of strings, full names of the local devices.
        facts: Dict from the name of a fact to its value, as `setup_facts` returns it.

    Returns:
        List of strings, the devices of all workers in the order of ranks.

    Raises:
        ValueError: If they differ; the message names the first worker that differs
            from worker 0.
    """
    fact = SharedFact("set-up", facts, _explain_setup)
    all_devices = compare(worker_group, "start-up", [fact], list(devices))
    return [
        _name_in_cluster(device, rank)
        for rank, of_worker in enumerate(all_devices)
        for device in of_worker
    ]


def _explain_setup(facts_by_rank: dict[int, dict[str, str]]) -> str:
    """Return the text that names the first fact in which a worker's set-up differs.

    The result is `""` if a worker only lacks facts, as one that joins may.

    Args:
        facts_by_rank: Dict from a worker's rank to the facts of its set-up.
    """
    first = facts_by_rank[0]
    return next(
        (
            f"Workers have different {name}: worker 0 has {first[name]}, worker {rank} "
            f"has {value}. Use the same on all."
            for rank, facts in facts_by_rank.items()
            for name, value in facts.items()
            if value != first[name]
        ),
        "",
    )


def setup_facts(
    devices: Sequence[str], options: CommunicationOptions, *, rebalances: bool = False
) -> dict[str, str]:
    """Return the facts of this process's set-up that must be the same on all workers.

    Args:
        devices: Sequence of strings, full names of the local devices.
        options: `CommunicationOptions`.
        rebalances: Bool, whether faster workers get more rows. Defaults to `False`.

    Returns:
        Dict from the name of a fact, for messages, to its value.
    """
    kinds = sorted({runtime.device_type(device) for device in devices})
    facts = {
        "devices per worker": f"{len(devices)} x {'/'.join(kinds)}",
        # Packages that define a step are compared, but not Python, whose version does
        # not change a step.
        "TensorFlow version": tf.__version__,
        "Keras version": keras.__version__,
        "settings of `rebalance`": str(rebalances).lower(),
    }
    for field in dataclasses.fields(options):
        # Timeouts and network interfaces do not change what a step computes, so they
        # may differ between workers.
        if field.name not in ("timeout_seconds", "interface"):
            facts[f"`{field.name}` options"] = repr(getattr(options, field.name))
    return facts


def _name_in_cluster(device: str, rank: int) -> str:
    """Return a name of a worker's device that no device of another worker has.

    Args:
        device: String, full name of the device in its own process.
        rank: Int, rank of the worker.
    """
    spec = tf.DeviceSpec.from_string(device)
    # TensorFlow's server puts the job and the task of the worker into the name of a
    # device, which makes the name unique. Without the server, the job is `localhost`.
    is_unique = spec.job != "localhost"
    return device if is_unique else spec.replace(job="worker", task=rank).to_string()


def agreed_topology(
    worker_group: WorkerGroup,
    hosts: Sequence[str],
    num_local: int,
    options: CommunicationOptions,
) -> Topology:
    """Find which replicas share a node; all workers use the result of worker 0.

    Args:
        worker_group: `WorkerGroup`.
        hosts: Sequence of strings, the host of each worker.
        num_local: Int, number of replicas of each worker.
        options: `CommunicationOptions`.

    Returns:
        A `Topology`.

    Raises:
        ValueError: If `node_size` or `nodes` do not fit the cluster.
    """
    found = topology_of(
        hosts, num_local, node_size=options.node_size, nodes=options.nodes
    )
    # All workers use the result of worker 0, since a host name may resolve to other
    # addresses on another machine.
    return Topology.from_json(worker_group.all_gather("topology", found.to_json())[0])


def check_same_variables(
    worker_group: WorkerGroup,
    topic: str,
    variables: Sequence[Any],
    verb: str,
    extra: Any = "",
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Raise on every worker if they do not have the same variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the point of the program, for error messages.
        variables: Sequence of variables, compared in order.
        verb: String, the worker's action on them, such as `"trains"`.
        extra: Value that is gathered in the same call. Defaults to `""`.
        timeout_seconds: Float or `None`, as for `WorkerGroup.all_gather`. Defaults to
            `None`.

    Returns:
        List of each worker's `extra`, ordered by rank.

    Raises:
        ValueError: If they do not; the message names the first variable that differs.
    """
    fact = variables_fact(variables, verb)
    return compare(worker_group, topic, [fact], extra, timeout_seconds=timeout_seconds)


def variables_fact(variables: Sequence[Any], verb: str) -> SharedFact:
    """Return a `SharedFact` of variables, which workers compare in order.

    Args:
        variables: Sequence of variables.
        verb: String, the worker's action on them, for the error, such as `"trains"`.
    """
    items = [(signature_of(variable), _describe(variable)) for variable in variables]
    problem = "Workers have different models. Build the same one on every worker."
    if verb == "creates":
        problem = (
            "Workers have different models. Build the same one on every worker; create "
            "what only one of them needs outside of `strategy.scope()`."
        )

    def explain(rank: int, index: int, first: str, other: str) -> str:
        """Return the error that names the first variable that differs.

        Args:
            rank: Int, the worker that differs from worker 0.
            index: Int, position of the variable.
            first: String, description of worker 0's variable at this position.
            other: String, that of the other worker's variable.
        """
        return (
            f"{problem} First difference, variable {index}: worker 0 {verb} {first}, "
            f"worker {rank} {verb} {other}."
        )

    return _fact_of_items("variables", items, explain)


def left_scope_message(rank: int, line: str, signatures: list[list]) -> str:
    """Format the error of a worker that left `strategy.scope()` without some variables.

    Args:
        rank: Int, rank of the worker that left.
        line: String, source line of the scope.
        signatures: List, the `signature_of` of each variable that this worker creates
            in the scope, at least one.
    """
    name, shape, dtype = signatures[0]
    return (
        f"Worker {rank} has left the scope of {line} without the variables that this "
        f"worker creates there, first {name!r} with shape {tuple(shape)} and dtype "
        f"{dtype}. Build the same model on every worker; create what only one of "
        "them needs outside of `strategy.scope()`."
    )


def check_same_plan(worker_group: WorkerGroup, plan: BucketPlan) -> None:
    """Raise on every worker if their bucket plans differ.

    Workers with the same variables may still call the layers in different orders, and
    would then sum gradients of different variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        plan: `BucketPlan` of this worker.

    Raises:
        ValueError: If they differ; the message names the first gradient whose position
            differs.
    """
    order = [
        ([number, bucket.dtype, index, list(entry.shape)], repr(entry.name))
        for number, bucket in enumerate(plan)
        for index, entry in zip(bucket.indices, bucket.entries, strict=True)
    ]

    def explain(rank: int, position: int, first: str, other: str) -> str:
        """Return the error that names the first gradient that differs.

        Args:
            rank: Int, the worker that differs from worker 0.
            position: Int, position of the gradient in the plan.
            first: String, name of worker 0's gradient at this position.
            other: String, name of the other worker's gradient.
        """
        return (
            "Workers would reduce the gradients of a model in different orders. Call "
            "its layers in the same order on every worker. First difference, gradient "
            f"{position}: that of {first} on worker 0, of {other} on worker {rank}."
        )

    fact = _fact_of_items("gradients", order, explain)
    compare(worker_group, "the buckets of the first step", [fact])


def check_same_program(
    worker_group: WorkerGroup,
    topic: str,
    conversions: list[list[str]],
    signatures: list[str],
    describe: Callable[[int], str],
    available: int | None,
) -> int | None:
    """Raise on every worker if their steps differ; return the least available memory.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the step, for error messages.
        conversions: List of a pair of strings for each tensor that the step combines
            across replicas: a text to compare, and a description of its operation.
        signatures: List of strings, one of each operation; their order may differ.
        describe: Callable, from an index into `signatures` to a description.
        available: Int, bytes of memory that this worker can get, or `None`.

    Returns:
        Int, the least available memory of all workers, or `None` if unknown.

    Raises:
        ValueError: If steps differ; the message names the first operation that does.
    """

    def whole() -> list:
        """Return the full description of this step, by which a difference is explained.

        Returns:
            List of two: `conversions`, and a dict from each signature to a list of
            the number of operations that have it and a description of the first.
        """
        counts = collections.Counter(signatures)
        firsts = {s: i for i, s in reversed([*enumerate(signatures)])}
        return [
            conversions,
            {s: [n, describe(firsts[s])] for s, n in counts.items()},
        ]

    fact = SharedFact(
        "operations",
        [[compared for compared, _ in conversions], sorted(signatures)],
        functools.partial(_explain_program, topic),
        whole,
    )
    known = compare(worker_group, topic, [fact], available)
    return min((each for each in known if each is not None), default=None)


def _explain_program(topic: str, programs: dict[int, list]) -> str:
    """Return the error that names the first operation in which two steps differ.

    Args:
        topic: String, the step.
        programs: Dict from the ranks of two workers to a list of two: `conversions` of
            `check_same_program`, and a dict from each signature to a list of the number
            of operations that have it and a description of the first.
    """
    steps = {rank: conversions for rank, (conversions, _) in programs.items()}
    (_, own), (rank, others) = ((r, counts) for r, (_, counts) in programs.items())
    if (difference := _first_difference(steps)) is not None:
        problem = f"Workers would hang in {topic}, which differs between them."
        _, _, first, other = difference
    else:
        problem = f"Workers would compute different things in {topic}."
        first, other = _first_excess(own, others), _first_excess(others, own)
    return (
        f"{problem} {_LET_NOTHING_CHOOSE} First operation that differs: {first} on "
        f"worker 0, {other} on worker {rank}."
    )


def _first_excess(own: dict[str, list], others: dict[str, list]) -> str:
    """Describe a worker's first operation that another one has less often.

    Args:
        own: Dict from each signature of a worker's operations to a list of their number
            and a description; the order decides which operation is the first.
        others: Dict, the same of another worker.

    Returns:
        String, the description, or `"nothing"` without such an operation.
    """
    excess = (text for s, (n, text) in own.items() if n > others.get(s, [0])[0])
    return next(excess, "nothing")


def _fact_of_items(
    name: str,
    items: Sequence[tuple[Any, str]],
    describe: Callable[[int, int, str, str], str],
) -> SharedFact:
    """Return a `SharedFact` of items, whose error describes the first one that differs.

    Args:
        name: String, noun for the items.
        items: Sequence of pairs of a value to compare and its description.
        describe: Callable that returns the error's text from the rank of the worker
            that differs from worker 0, the position of the item, and the descriptions
            of the item on worker 0 and on that worker.
    """

    def explain(lists: dict[int, list]) -> str:
        """Return the error that names the first item that differs, `""` if none does.

        Args:
            lists: Dict from the ranks of two workers to their `items`.
        """
        difference = _first_difference(lists)
        return "" if difference is None else describe(*difference)

    return SharedFact(name, [each for each, _ in items], explain, lambda: items)


def _first_difference(lists: dict[int, list]) -> tuple[int, int, str, str] | None:
    """Find the first item in which a worker differs from worker 0.

    Args:
        lists: Dict from the ranks of two workers to their items, as in
            `_fact_of_items`.

    Returns:
        Tuple of the rank of the worker that differs, the position of the item, and the
        descriptions of the item on worker 0 and on that worker; `None` if all items are
        equal.
    """
    rank, nothing = max(lists), (None, "nothing")
    pairs = itertools.zip_longest(lists[0], lists[rank], fillvalue=nothing)
    return next(
        (
            (rank, position, first[1], other[1])
            for position, (first, other) in enumerate(pairs)
            if first[0] != other[0]
        ),
        None,
    )


def signature_of(variable: Any) -> list:
    """Return a list of the name, shape and dtype by which workers compare a variable.

    The name lacks the numbers that Keras appends.
    """
    # Automatic numbers are removed: equal variables have different ones if a worker has
    # built another model before.
    return [_AUTO_NUMBER.sub("", _name(variable)), *_type(variable)]


def _describe(variable: Any) -> str:
    """Describe a variable: `"'dense/kernel' with shape (2, 3) and dtype float32"`."""
    shape, dtype = _type(variable)
    return f"{_name(variable)!r} with shape {tuple(shape)} and dtype {dtype}"


def _name(variable: Any) -> str:
    """Return a variable's path, or its name without an output index such as `":0"`."""
    return str(getattr(variable, "path", None) or variable.name).split(":")[0]


def _type(variable: Any) -> tuple[list, str]:
    """Return a variable's shape, as a list of ints, and the name of its dtype."""
    dtype = getattr(variable.dtype, "name", variable.dtype)
    return list(variable.shape), str(dtype)
