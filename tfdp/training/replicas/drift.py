"""Drift: find replicas with different weights and the first variable that differs."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NoReturn

import tensorflow as tf

from tfdp.communication.coordination.facts import digest
from tfdp.ground._compat import tf_distribute
from tfdp.ground.text import pluralize
from tfdp.training.replicas.assigned_values import recorded_weights
from tfdp.training.replicas.checksum import checksums

# The largest number of replicas that a message names: hundreds would be unreadable.
_MAX_NAMED = 8


def replicated_weights(model: Any) -> list:
    """Return a list of the weights of a model that should be equal on all replicas.

    Keras's `weights` leaves out metric states and the seeds of random layers.
    """
    return [weight for weight in model.weights if _is_replicated(weight.value)]


def compared_weights(model: Any) -> list:
    """Return a list of the weights of a model that workers compare.

    They are the replicated weights, and the weights with sharded state, whose
    assignments outside of steps are recorded.
    """
    replicated = replicated_weights(model)
    known = {id(weight) for weight in replicated}
    return [*replicated, *(w for w in recorded_weights(model) if id(w) not in known)]


def check_weights(strategy: Any, weights: Sequence[Any], topic: str, when: str) -> None:
    """Raise on every worker if replicas hold different weights; all workers call it.

    Args:
        strategy: A tfdp strategy.
        weights: Sequence of Keras variables.
        topic: String, the name of the all-gather in messages.
        when: String, the point in training, for the message.

    Raises:
        RuntimeError: Naming the replicas and the first variable that differs.
    """
    tables = _local_checksums(strategy, weights)
    digests = [digest(table) for table in tables]
    totals = _all_gather(strategy, topic, digests)
    if len(set(totals)) > 1:
        _raise_drift(strategy, weights, when, totals, tables)


def raise_difference(
    strategy: Any, model: Any, when: str, totals: Sequence[Any]
) -> NoReturn:
    """Raise on every worker an error about detected drift; all workers call it.

    Args:
        strategy: A tfdp strategy.
        model: Keras model.
        when: String, the point in training, for the message.
        totals: Sequence with a checksum of all weights of each replica.

    Raises:
        RuntimeError: Naming the replicas and the first variable that differs.
    """
    weights = compared_weights(model)
    tables = _local_checksums(strategy, weights)
    _raise_drift(strategy, weights, when, totals, tables)


def describe_drift(
    totals: Sequence[Any],
    tables: Sequence[Sequence[int]],
    paths: Sequence[str],
    replicas: Sequence[str],
) -> str:
    """Describe the replicas that differ from the others, and the first variable.

    Args:
        totals: Sequence with a checksum of all weights of each replica, computed when
            drift was detected.
        tables: Sequence with a list for each replica: the current checksum of each
            weight.
        paths: Sequence of strings, the names of the weights.
        replicas: Sequence of strings, the names of the replicas.

    Returns:
        String with the replicas, the first weight that differs, and how many differ.

    Example:

    >>> names = ["replica 0", "replica 1", "replica 2"]
    >>> describe_drift([1, 2, 1], [[5, 6], [5, 7], [5, 6]], ["a", "b"], names)
    "replica 1 differs from the other 2 in 'b' (1 of 2 variables)"
    """
    columns = list(zip(*tables, strict=True))
    differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:
        return (
            f"{_describe_outliers(totals, replicas)} in a variable whose values are "
            "equal again"
        )
    first = differing[0]
    return (
        f"{_describe_outliers(columns[first], replicas)} in {paths[first]!r} "
        f"({len(differing)} of {pluralize(len(paths), 'variable')})"
    )


def outliers(values: Sequence[Any]) -> list[int]:
    """Return the positions of values other than the most frequent one.

    Args:
        values: Sequence of values, not all alike.

    Returns:
        List of ints: all positions if no value is the most frequent one.

    Example:

    >>> outliers([7, 7, 3]), outliers([7, 3])
    ([2], [0, 1])
    """
    (value, count), *others = collections.Counter(values).most_common()
    if others and others[0][1] == count:
        return list(range(len(values)))
    return [index for index, current in enumerate(values) if current != value]


def _describe_outliers(values: Sequence[Any], replicas: Sequence[str]) -> str:
    """Describe the replicas whose value differs from the most frequent one.

    Args:
        values: Sequence with a value for each replica, such as a checksum; not all
            alike.
        replicas: Sequence of strings, the names of the replicas.

    Returns:
        String, such as `"replica 1 differs from the other 2"`.
    """
    odd = outliers(values)
    shown = [replicas[index] for index in odd[:_MAX_NAMED]]
    if len(odd) > len(shown):
        shown.append(f"{len(odd) - len(shown)} more")
    named = " and ".join([", ".join(shown[:-1]), shown[-1]] if shown[1:] else shown)
    if len(odd) == len(values):
        return f"{named} differ from each other"
    verb = "differ" if len(odd) > 1 else "differs"
    return f"{named} {verb} from the other {len(values) - len(odd)}"


def _raise_drift(
    strategy: Any,
    weights: Sequence[Any],
    when: str,
    totals: Sequence[Any],
    tables: list[list[int]],
) -> NoReturn:
    """Exchange the checksums of each weight, and raise the error about drift.

    Records of assignments are cleared, so that a later check compares only new ones.

    Args:
        strategy: A tfdp strategy.
        weights: Sequence of Keras variables.
        when: String, the point in training, for the message.
        totals: Sequence with one checksum, of all weights, for each replica of all
            workers, by rank.
        tables: List with, for each local replica, the checksum of each weight.
    """
    all_tables = _all_gather(strategy, "replicas that differ", tables)
    paths = [weight.path for weight in weights]
    for weight, column in zip(weights, zip(*all_tables, strict=True), strict=True):
        record = getattr(weight.value, "assigned", None)
        if record is not None:
            record.clear_after_comparison(are_alike=len(set(column)) == 1)
    drift = describe_drift(totals, all_tables, paths, replica_names(strategy))
    raise RuntimeError(
        f"Replicas have drifted apart, as seen {when}: {drift}. Every replica makes "
        "the same updates of the same weights, so that one computes wrongly, or "
        "something changes the weights of some replicas only. Continue from an earlier "
        "checkpoint."
    )


def _all_gather(strategy: Any, topic: str, local: list) -> list:
    """All-gather a list with an item for each local replica.

    Args:
        strategy: A tfdp strategy.
        topic: String, the name of the all-gather in messages.
        local: List with an item for each local replica.

    Returns:
        List with the items of all replicas, ordered by rank.
    """
    gathered = strategy.extended.worker_group.all_gather(topic, local)
    return [item for worker_items in gathered for item in worker_items]


def _local_checksums(strategy: Any, weights: Sequence[Any]) -> list[list[int]]:
    """Compute the checksum of each weight on each local replica.

    For replicated weights it is the checksum of the value. For weights that record
    assignments outside of steps, the checksum of the record is added.

    Args:
        strategy: A tfdp strategy.
        weights: Sequence of Keras variables.

    Returns:
        List with, for each local replica, a list with an int for each weight.
    """
    values = [weight.value for weight in weights]
    whole = [index for index, value in enumerate(values) if _is_replicated(value)]
    records = [getattr(value, "assigned", None) for value in values]
    tables = []
    for replica, device in enumerate(strategy.extended.group.devices):
        table = [0 if record is None else record.checksum for record in records]
        with tf.device(device):
            parts = [values[index].values[replica].read_value() for index in whole]
            sums = checksums(parts).numpy().tolist()
        for index, number in zip(whole, sums, strict=True):
            table[index] += number
        tables.append(table)
    return tables


def replica_names(strategy: Any) -> list[str]:
    """Return the name of each replica for messages.

    Returns:
        List of strings, such as `"replica 3 (GPU:1 of worker 1, host-b)"`, by rank.
    """
    extended = strategy.extended
    specs = [tf.DeviceSpec.from_string(device) for device in extended.group.devices]
    local = [f"{spec.device_type}:{spec.device_index}" for spec in specs]
    places = [
        f"{device} of worker {rank}, {host}" if len(extended.hosts) > 1 else device
        for rank, host in enumerate(extended.hosts)
        for device in local
    ]
    return [f"replica {rank} ({place})" for rank, place in enumerate(places)]


def _is_replicated(value: Any) -> bool:
    """Return whether every replica should hold the same value of a variable.

    Sharded parameters, variables that are not mirrored, and those of strings, resources
    or variants are not replicated. `value` is the `value` of a Keras variable.
    """
    is_mirrored = isinstance(value, tf_distribute.MirroredVariable)
    if getattr(value, "has_parts", False):
        return False
    return is_mirrored and value.dtype not in (tf.string, tf.resource, tf.variant)
