"""Agreement of the workers on a call of Keras, by one message before it begins.

Workers that differ would wait for each other for ever, or train on what is wrong
without a word. Any difference is an error of all of them, in one sentence.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.checks import require_equal
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.training.data.checks import describe_arrays, named_arrays
from tfdp.training.data.fingerprints import ArrayValues, find_difference
from tfdp.training.keras_hooks import configs
from tfdp.training.keras_hooks.worker_callbacks import (
    callback_list,
    decide_per_batch,
    describe_mismatch,
    find_callback_problem,
    tfdp_callback_names,
)
from tfdp.training.replicas.assigned_values import recorded_weights
from tfdp.training.replicas.synchronized_scope import synchronize_created

_DATA = ("x", "y", "sample_weight")
_KERAS_BATCH_SIZE = 32
# What each worker may choose for itself. Of data and callbacks more is compared.
_FREE = ("verbose", "return_dict", "callbacks", "kwargs")
_NO_SETTINGS = (*_FREE, *_DATA, "validation_data", "batch_size")
_OF_MODEL = ("steps_per_execution", "run_eagerly", "jit_compile")
# What a process sets for all of its models.
_OF_PROCESS = {
    "tf.config.functions_run_eagerly": tf.config.functions_run_eagerly,
    "keras.config.max_epochs": keras.config.max_epochs,
    "keras.config.max_steps_per_epoch": keras.config.max_steps_per_epoch,
}

# By model and by method (`train_on_batch` and its like): the number of calls, and a
# digest of the batches that they were given.
_calls: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, str]]]
_calls = weakref.WeakKeyDictionary()


def agree_on_loop(
    strategy: Any, name: str, model: Any, bound: inspect.BoundArguments
) -> bool:
    """Raise on every worker if they would not run the same loop.

    Variables that they have created in a scope that is not left yet are synchronized.

    Args:
        strategy: A tfdp strategy of several workers.
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        model: The Keras model.
        bound: The arguments of the call.

    Returns:
        Bool, whether a callback of any worker acts after each batch.

    Raises:
        ValueError: Naming the first difference, or what is wrong with the callbacks.
    """
    arguments = bound.arguments
    own: dict[str, Any] = {
        "settings": _settings_of(model, bound),
        "arrays": _arrays_of(arguments),
    }
    callbacks: list = []
    if name == "fit":
        callbacks = callback_list(arguments.get("callbacks"))
        if strategy.extended.worker_group.is_chief:
            own["problem"] = find_callback_problem(callbacks, arguments)
        own["callbacks"] = tfdp_callback_names(callbacks)
        own["each_batch"] = decide_per_batch(callbacks)
    found = configs.configs_of(name, model, callbacks)
    told = _compare(strategy, name, model, own, found, _values_of(arguments))
    return any(text.get("each_batch") for text in told)


def agree_on_batch(
    strategy: Any, name: str, model: Any, arguments: dict[str, Any]
) -> None:
    """Raise on every worker if they give a step different batches.

    The batches so far are compared at the first, second, fourth, eighth, ... call:
    at calls that follow from their number alone, so that no worker waits for one that
    compares nothing.

    Args:
        strategy: A tfdp strategy.
        name: String, such as `"train_on_batch"`.
        model: The Keras model.
        arguments: Dict, the arguments of the call by name.

    Raises:
        ValueError: Naming the first difference.
    """
    if strategy.extended.worker_group.num_workers == 1:
        return
    arrays = describe_arrays({part: arguments.get(part) for part in _DATA})
    calls = _calls.setdefault(model, {})
    number, before = calls.get(name, (0, ""))
    digest = hashlib.sha256(f"{before} {json.dumps(arrays)}".encode()).hexdigest()
    if number & (number + 1) == 0:  # the call is a power of two
        found = configs.configs_of(name, model, []) if number == 0 else {}
        given = named_arrays({part: arguments.get(part) for part in _DATA})
        own = {
            "settings": _of_model(model)
            | {"class_weight": configs.comparable(arguments.get("class_weight"))},
            "arrays": [arrays, {"all batches so far": digest}],
        }
        values = ArrayValues(given or {})
        _compare(strategy, name, model, own, found, values)
    calls[name] = (number + 1, digest)


def _settings_of(model: Any, bound: inspect.BoundArguments) -> dict[str, Any]:
    """Settings of a loop by which the number and the kind of its steps differ."""
    arguments = bound.arguments
    given = {
        key: configs.comparable(arguments.get(key, parameter.default))
        for key, parameter in list(bound.signature.parameters.items())[1:]
        if key not in _NO_SETTINGS
    }
    if arguments.get("validation_data") is not None:
        given["validation_data"] = "given"
    return _of_model(model) | given


def _of_model(model: Any) -> dict[str, Any]:
    of_model = {name: configs.comparable(getattr(model, name)) for name in _OF_MODEL}
    return of_model | {name: read() for name, read in _OF_PROCESS.items()}


def _arrays_of(arguments: dict[str, Any]) -> list[dict[str, Any] | None]:
    """The arrays for a loop and for its validation; `None` for other data."""
    found = describe_arrays({name: arguments.get(name) for name in _DATA})
    if found is not None:
        found["batch_size"] = arguments.get("batch_size") or _KERAS_BATCH_SIZE
    return [found, describe_arrays(_validation_parts(arguments))]


def _validation_parts(arguments: dict[str, Any]) -> dict[str, Any]:
    validation = arguments.get("validation_data")
    if not isinstance(validation, (tuple, list)):
        return {"validation_data": validation}
    return {f"validation_data[{i}]": part for i, part in enumerate(validation)}


def _values_of(arguments: dict[str, Any]) -> ArrayValues:
    """The values of the arrays for a loop and for its validation.

    They are read anew in each call: a script may shuffle an array in place.
    """
    given = {name: arguments.get(name) for name in _DATA}
    parts = named_arrays(given), named_arrays(_validation_parts(arguments))
    return ArrayValues(
        {key: leaf for part in parts for key, leaf in (part or {}).items()}
    )


def _compare(
    strategy: Any,
    name: str,
    model: Any,
    own: dict[str, Any],
    found: dict[str, Any],
    values: ArrayValues,
) -> list[dict[str, Any]]:
    """Gather what all workers have, and raise on all of them if it differs."""
    worker_group: WorkerGroup = strategy.extended.worker_group
    topic = f"the settings of {name}"
    created = strategy.extended.new_variables.take()
    own = own | {
        "configs": configs.fingerprint(found),
        "created": created.summary,
        "assigned": _assigned_to(model),
        "values": values.fingerprints(),
    }
    told = worker_group.all_gather(topic, own)
    synchronize_created(strategy, created, [each["created"] for each in told])
    problem = told[0].get("problem") or describe_mismatch(
        [each.get("callbacks", []) for each in told]
    )
    if problem:
        raise worker_group.error(problem)
    require_equal(
        worker_group,
        f"Workers call `{name}` with different settings. Give every worker the same "
        "arguments, and compile the model alike.",
        [each["settings"] for each in told],
    )
    _check_arrays(worker_group, name, told)
    _check_values(worker_group, name, told, values)
    _check_configs(worker_group, topic, told, found)
    _check_assignments(worker_group, topic, told, model)
    return told


def _check_arrays(worker_group: WorkerGroup, name: str, told: list[dict]) -> None:
    problem = (
        f"Workers give `{name}` different arrays. Give every worker the same ones, of "
        "which each takes its rows, or a `tf.data.Dataset` of its own with "
        "`AutoShardPolicy.OFF`."
    )
    for parts in zip(*(each["arrays"] for each in told), strict=True):
        if None not in parts:  # datasets tell their lengths where they are distributed
            require_equal(worker_group, problem, parts)


def _check_values(
    worker_group: WorkerGroup, name: str, told: list[dict], values: ArrayValues
) -> None:
    """Raise if values of arrays differ, unless only by rounding."""
    prints = [each["values"] for each in told]
    topic = f"the settings of {name}"
    found = find_difference(worker_group, topic, prints, values)
    if found:
        raise worker_group.error(
            f"Workers give `{name}` arrays of different values, so that some rows "
            "would be read twice and others never. Draw, shuffle, split and list data "
            "alike on every worker, by one seed and in sorted order, or give each a "
            "`tf.data.Dataset` of its own with `AutoShardPolicy.OFF`. "
            f"Received: {found}"
        )


def _assigned_to(model: Any) -> str:
    """Digest of what was assigned to weights of which each worker has a part."""
    records = [weight.value.assigned for weight in recorded_weights(model)]
    if not any(record.digest or record.is_mixed for record in records):
        return ""
    text = json.dumps([[record.digest, record.is_mixed] for record in records])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_assignments(
    worker_group: WorkerGroup, topic: str, told: list[dict], model: Any
) -> None:
    """Raise if workers have parts of a weight that are of different values.

    The assignments are not compared again if all have made the same.
    """
    if not any(each["assigned"] for each in told):
        return
    weights = recorded_weights(model)
    records = [weight.value.assigned for weight in weights]
    own = [[record.digest, record.is_mixed, record.text] for record in records]
    all_own = [own] * len(told)
    if len({each["assigned"] for each in told}) > 1:
        all_own = worker_group.all_gather(f"{topic}: assigned values", own)
    problem = ""
    by_weight = zip(*all_own, strict=True)
    for weight, record, entries in zip(weights, records, by_weight, strict=True):
        are_alike = all(entry[:2] == entries[0][:2] for entry in entries)
        if not problem and (not are_alike or record.is_mixed):
            found = [f"{entry[2]} on worker {r}" for r, entry in enumerate(entries)]
            problem = (
                "Workers have assigned different values to a weight of which each "
                "keeps or updates its own part. Assign the same to it on every worker, "
                "by the same calls of `set_weights`, `assign` and `load_weights`. "
                f"Received: {weight.path!r}, {', '.join(found)}"
            )
        record.compared(are_alike=are_alike)
    if problem:
        raise worker_group.error(problem)


def _check_configs(
    worker_group: WorkerGroup, topic: str, told: list[dict], own: dict[str, Any]
) -> None:
    """Raise if configs differ; they travel only then."""
    digests = [each["configs"] for each in told]
    other = next((r for r, each in enumerate(digests) if each != digests[0]), None)
    if other is None:
        return
    is_told = worker_group.rank in (0, other)
    found = worker_group.all_gather(f"{topic}: configs", own if is_told else {})
    require_equal(
        worker_group,
        "Workers have models, optimizers, losses, metrics or callbacks with different "
        "settings. Make them alike on every worker.",
        {0: found[0], other: found[other]},
    )
