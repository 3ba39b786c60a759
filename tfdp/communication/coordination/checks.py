"""Comparisons between workers, before collectives that would hang or sum wrongly.

Workers compare their set-up after all have joined, variables when they are created and
trained, and the buckets and operations of a first step. They exchange digests, and the
compared values only if the digests differ; then all raise one error that names the
first difference.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.cluster import topology_of
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import _compat
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan
from tfdp.ground.plans.topology import Topology

# Number that Keras appends to the name of a variable; in the name of an optimizer's
# slot, the name of the variable comes first.
_AUTO_NUMBER = re.compile(r"_\d+(?=[/:_]|$)")
_LET_NOTHING_CHOOSE = (
    "What a step computes must not depend on anything that differs between workers, "
    "such as a rank or Python's `random`."
)
# Largest number of characters of a value in the description of a difference.
_LONGEST_VALUE = 60


def check_same_setup(
    worker_group: WorkerGroup,
    devices: Sequence[str],
    facts: dict[str, str],
) -> list[str]:
    """Raise on every worker if device counts, versions or options differ.

    Args:
        worker_group: `WorkerGroup`.
        devices: Sequence of strings, full names of the local devices.
        facts: Dict from the name of a fact to its value, such as `setup_facts`.

    Returns:
        List of strings, the devices of all workers in the order of ranks.

    Raises:
        ValueError: If they differ; the message names the first worker that differs
            from worker 0.
    """
    setup = {"devices": list(devices), "facts": facts}
    messages = worker_group.all_gather("start-up", setup)
    first = messages[0]["facts"]
    for rank, message in enumerate(messages):
        for name, value in message["facts"].items():
            if value != first[name]:
                raise ValueError(
                    f"Workers have different {name}: worker 0 has {first[name]}, "
                    f"worker {rank} has {value}. Use the same on all."
                )
    return [
        _name_in_cluster(device, rank)
        for rank, message in enumerate(messages)
        for device in message["devices"]
    ]


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
    kinds = sorted({_compat.device_type(device) for device in devices})
    facts = {
        "devices per worker": f"{len(devices)} x {'/'.join(kinds)}",
        # Packages that define a step are compared, but not Python, whose version does
        # not change a step.
        "TensorFlow version": tf.__version__,
        "Keras version": keras.__version__,
        "settings of `rebalance`": str(rebalances).lower(),
    }
    for field in dataclasses.fields(options):
        # Timeouts and network interfaces may differ between workers.
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
    # If TensorFlow's server runs, the name has the job and the task of the worker
    # already.
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
    beside: Any = "",
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Raise on every worker if they do not have the same variables.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the point of the program, for error messages.
        variables: Sequence of variables, compared in order.
        verb: String, the worker's action on them, such as `"trains"`.
        beside: Value that is gathered in the same call. Defaults to `""`.
        timeout_seconds: Float or `None`, as for `WorkerGroup.all_gather`. Defaults to
            `None`.

    Returns:
        List of each worker's `beside`, ordered by rank.

    Raises:
        ValueError: If they do not; the message names the first variable that differs.
    """
    items = [(signature_of(variable), _describe(variable)) for variable in variables]
    difference, values = _compare_items(
        worker_group, topic, "variables", items, beside, timeout_seconds
    )
    if difference is None:
        return values
    rank, index, first, other = difference
    text = (
        f"First difference, variable {index}: worker 0 {verb} {first}, worker {rank} "
        f"{verb} {other}."
    )
    if verb == "creates":
        raise ValueError(
            "Workers have different models. Build the same one on every worker; "
            "create what only one of them needs outside of `strategy.scope()`. "
            f"{text}"
        )
    raise ValueError(
        f"Workers have different models. Build the same one on every worker. {text}"
    )


def left_scope_message(rank: int, line: str, signatures: list[list]) -> str:
    """Format the error that another worker has left a scope without its variables.

    Args:
        rank: Int, rank of the other worker.
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
    topic = "the buckets of the first step"
    difference, _ = _compare_items(worker_group, topic, "gradients", order)
    if difference is not None:
        rank, position, first, other = difference
        raise ValueError(
            "Workers would reduce the gradients of a model in different orders. Call "
            "its layers in the same order on every worker. First difference, gradient "
            f"{position}: that of {first} on worker 0, of {other} on worker {rank}."
        )


def check_same_program(
    worker_group: WorkerGroup,
    topic: str,
    conversions: list[list[str]],
    signatures: list[str],
    describe: Callable[[int], str],
    available: int | None,
) -> int | None:
    """Raise on every worker if their steps compute different things.

    Workers compare digests of all operations, and their lists only if digests differ.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the step, for error messages.
        conversions: List, for each tensor that the step combines across replicas, of
            two strings: the value to compare, and a description of its operation.
        signatures: List of strings, one of each operation; their order may differ.
        describe: Callable, from an index into `signatures` to a description.
        available: Int, bytes of memory that this worker can get, or `None`.

    Returns:
        Int, the least available memory of all workers, or `None` if unknown.

    Raises:
        ValueError: If they do; the message names the first operation that differs.
    """
    if worker_group.num_workers == 1:
        return available
    compared = json.dumps([[what for what, _ in conversions], sorted(signatures)])
    digest = hashlib.sha256(compared.encode()).hexdigest()
    answers = worker_group.all_gather(topic, [digest, available])
    if len({each for each, _ in answers}) == 1:
        return min((n for _, n in answers if n is not None), default=None)
    counts = collections.Counter(signatures)
    answers = worker_group.all_gather(f"{topic}: operations", [conversions, counts])
    steps, all_counts = zip(*answers, strict=True)
    if (difference := _first_difference(steps)) is not None:
        rank, _, first, other = difference
        raise ValueError(
            f"Workers would hang in {topic}, which differs between them. "
            f"{_LET_NOTHING_CHOOSE} First operation that differs: {first} on worker 0, "
            f"{other} on worker {rank}."
        )
    # The conversions are equal on all workers, so the operations of some worker differ.
    rank = next(r for r, others in enumerate(all_counts) if others != all_counts[0])
    compared = all_counts[0 if worker_group.rank else rank]
    differing = next(
        (i for i, s in enumerate(signatures) if counts[s] > compared.get(s, 0)), None
    )
    operations = worker_group.all_gather(
        f"{topic}: first difference",
        "nothing" if differing is None else describe(differing),
    )
    raise ValueError(
        f"Workers would compute different things in {topic}. {_LET_NOTHING_CHOOSE} "
        f"First operation that differs: {operations[0]} on worker 0, "
        f"{operations[rank]} on worker {rank}."
    )


def _compare_items(
    worker_group: WorkerGroup,
    topic: str,
    what: str,
    items: Sequence[tuple[Any, str]],
    beside: Any = "",
    timeout_seconds: float | None = None,
) -> tuple[tuple[int, int, str, str] | None, list[Any]]:
    """Compare lists between workers by digest; find the first item that differs.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the point of the program.
        what: String, noun for the items.
        items: Sequence of pairs of a value to compare and its description.
        beside: Value that is gathered with the digests. Defaults to `""`.
        timeout_seconds: Float or `None`, as for `WorkerGroup.all_gather`. Defaults to
            `None`.

    Returns:
        Tuple of the result of `_first_difference`, `None` if all lists are equal, and
        of the list of each worker's `beside`.
    """
    if worker_group.num_workers == 1:
        return None, [beside]
    compared = json.dumps([each for each, _ in items])
    own = hashlib.sha256(compared.encode()).hexdigest(), beside
    answers = worker_group.all_gather(topic, own, timeout_seconds)
    digests, values = zip(*answers, strict=True)
    if len(set(digests)) == 1:
        return None, list(values)
    lists = worker_group.all_gather(f"{topic}: {what}", items)
    return _first_difference(lists), list(values)


def _first_difference(
    lists: Sequence[Sequence[Any]],
) -> tuple[int, int, str, str] | None:
    """Find the first item in which a worker differs from worker 0.

    Args:
        lists: Sequence of the items of each worker, as in `_compare_items`.

    Returns:
        Tuple of the rank of a worker that differs, the position of the item, and the
        descriptions of the item on worker 0 and on that worker; or `None`.
    """
    nothing = (None, "nothing")
    for rank, items in enumerate(lists[1:], start=1):
        pairs = itertools.zip_longest(lists[0], items, fillvalue=nothing)
        for position, (first, other) in enumerate(pairs):
            if first[0] != other[0]:
                return rank, position, first[1], other[1]
    return None


def signature_of(variable: Any) -> list:
    """Return the name, shape and dtype by which workers compare a variable."""
    # Automatic numbers are removed: they differ if a worker has built another model.
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


class _Missing:
    """Placeholder for a value that a worker lacks and another worker has."""

    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def require_equal(problem: str, values: Sequence[Any] | dict[int, Any]) -> None:
    """Raise, with the first difference, if workers' values differ.

    Args:
        problem: String, the problem and its remedy; the difference is appended.
        values: Sequence of a nest of dicts, lists and plain values for each worker, as
            all-gathered; or a dict of nests by rank, for some workers.

    Raises:
        ValueError: If the values differ.
    """
    by_worker = values if isinstance(values, dict) else dict(enumerate(values))
    difference = describe_difference(by_worker)
    if difference:
        raise ValueError(f"{problem} Received: {difference}")


def describe_difference(values: Mapping[int, Any]) -> str:
    """Describe the first difference between workers' nests, or return `""`.

    Args:
        values: Mapping from a worker's rank to a nest of dicts, lists and plain values.

    Returns:
        String: the path, and each worker's value at it.

    Example:

    >>> describe_difference({0: {"a": 1, "b": [2, 3]}, 1: {"a": 1, "b": [2]}})
    'b/1: 3 on worker 0, nothing on worker 1'
    """
    first = values[min(values)]
    paths = (_first_differing_path(first, other) for other in values.values())
    path = next((found for found in paths if found is not None), None)
    if path is None:
        return ""
    by_rank = ", ".join(
        f"{_short_repr(_value_at(value, path))} on worker {rank}"
        for rank, value in values.items()
    )
    return f"{'/'.join(map(str, path))}: {by_rank}"


def _first_differing_path(first: Any, other: Any) -> tuple | None:
    """Return the path of the first difference between two nests, or `None`.

    Returns:
        Tuple of keys of dicts and indices of lists, the outermost first.
    """
    keys: list[Any]
    if isinstance(first, dict) and isinstance(other, dict):
        keys = [*first, *(key for key in other if key not in first)]
    elif isinstance(first, list) and isinstance(other, list):
        keys = list(range(max(len(first), len(other))))
    else:
        # NaN counts as equal to NaN.
        is_same = first == other or (first != first and other != other)
        return None if is_same else ()
    for key in keys:
        path = _first_differing_path(_value_at(first, (key,)), _value_at(other, (key,)))
        if path is not None:
            return (key, *path)
    return None


def _value_at(value: Any, path: tuple) -> Any:
    """Return the value at a path in a nest, or `_MISSING` if there is none."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def _short_repr(value: Any) -> str:
    """Format a value, shortened to `_LONGEST_VALUE` characters."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
