"""Agreement of the workers on a call of Keras, by an all-gather before it begins.

Workers that differ would wait for each other indefinitely, or silently train on wrong
data. Any difference is an error on all workers, described in one sentence.

Each worker sends its facts about the call: its settings, the shapes of its arrays, and
digests of its configs and values. In the functions below `name` is the method of Keras
that was called.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.facts import SharedFact, compare, digest, explain
from tfdp.communication.coordination.model_group import worker_group_of
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.base.feature import equalize_replicas
from tfdp.ground.base.wrappers import rate_variables
from tfdp.training.data.checks import describe_arrays, named_arrays
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.value_differences import find_difference, values_fact
from tfdp.training.keras_hooks import configs, scope_checks
from tfdp.training.keras_hooks.worker_callbacks import (
    callback_list,
    describe_mismatch,
    find_callback_problem,
    may_stop_after_batch,
    tfdp_callback_names,
)
from tfdp.training.replicas.assigned_values import recorded_weights
from tfdp.training.replicas.drift import replicated_weights
from tfdp.training.replicas.synchronized_scope import synchronize_created
from tfdp.training.replicas.variables import MirroredVariable

_DATA_ARGUMENTS = ("x", "y", "sample_weight")
# Workers compare the batch size that Keras will use, which is 32 for arrays if
# `batch_size` is `None`.
_KERAS_BATCH_SIZE = 32
# These arguments of a loop may differ between workers. `verbose` and `return_dict` only
# affect what a worker prints and returns, callbacks are compared separately, and
# `kwargs` only serve Keras internally.
_WORKER_ARGUMENTS = ("verbose", "return_dict", "callbacks", "kwargs")
# Data and the batch size are not compared as settings, because the description of the
# arrays contains them.
_NOT_SETTINGS = (*_WORKER_ARGUMENTS, *_DATA_ARGUMENTS, "validation_data", "batch_size")
_MODEL_ATTRIBUTES = ("steps_per_execution", "run_eagerly", "jit_compile")
# These settings of a process affect the steps of all its models, so workers compare
# them together with the settings of the model. Each value is the function that reads
# the setting.
_PROCESS_SETTINGS = {
    "tf.config.functions_run_eagerly": tf.config.functions_run_eagerly,
    "keras.config.max_epochs": keras.config.max_epochs,
    "keras.config.max_steps_per_epoch": keras.config.max_steps_per_epoch,
}

# Workers compare the batches of `train_on_batch` and similar methods at few calls only.
# So the number of calls is kept for each model and method, with a digest of the shapes
# and dtypes of all batches so far.
_batch_calls: weakref.WeakKeyDictionary[Any, dict[str, tuple[int, str]]]
_batch_calls = weakref.WeakKeyDictionary()


def agree_on_loop(
    strategy: Any, name: str, model: Any, bound: inspect.BoundArguments
) -> bool:
    """Raise on every worker if workers would run different loops.

    Workers compare the calls, data, models and callbacks by an all-gather. By the same
    one they compare new variables, which then get worker 0's values.

    Args:
        strategy: A tfdp strategy of several workers.
        name: String, `"fit"`, `"evaluate"` or `"predict"`.
        model: The Keras model.
        bound: `inspect.BoundArguments` of the call.

    Returns:
        Bool, whether a callback of any worker may stop training after a batch.

    Raises:
        ValueError: The message names the first difference, or a problem with callbacks.
    """
    arguments = bound.arguments
    own: dict[str, Any] = {
        "settings": _settings_of(name, model, bound),
        "arrays": _describe_data(arguments),
    }
    callbacks: list = []
    extra: dict[str, Any] = {}
    if name == "fit":
        given = callback_list(arguments.get("callbacks"))
        if worker_group_of(model).is_chief:
            extra["problem"] = find_callback_problem(given, arguments)
        # A class in place of a callback has no settings to read, and is reported by
        # `find_callback_problem`.
        callbacks = [c for c in given if not isinstance(c, type)]
        own["callbacks"] = tfdp_callback_names(callbacks)
        extra["each_batch"] = may_stop_after_batch(callbacks)
    has_trained = strategy.extended.generation > 0
    own["configs"] = configs.configs_of(name, model, callbacks, has_trained=has_trained)
    gathered = _compare_workers(
        strategy, name, model, own, _values_of(arguments), extra
    )
    return any(each.get("each_batch") for each in gathered)


def agree_on_batch(
    strategy: Any, name: str, model: Any, arguments: dict[str, Any]
) -> None:
    """Raise on every worker if workers pass different batches to a step.

    The batches so far are compared at the first, second, fourth, eighth, ... call. The
    number of a call alone decides, so that all workers compare at the same call.

    Args:
        strategy: A tfdp strategy.
        name: String, such as `"train_on_batch"`.
        model: The Keras model.
        arguments: Dict, the arguments of the call by name.

    Raises:
        ValueError: The message names the first difference.
    """
    if worker_group_of(model).num_workers == 1:
        return
    arrays = describe_arrays({part: arguments.get(part) for part in _DATA_ARGUMENTS})
    calls = _batch_calls.setdefault(model, {})
    number, before = calls.get(name, (0, ""))
    so_far = digest([before, arrays])
    # `number` counts the earlier calls. Only the first, second, fourth, eighth and so
    # on of all calls are compared, so that a comparison rarely delays a call.
    if number & (number + 1) == 0:
        named = named_arrays({part: arguments.get(part) for part in _DATA_ARGUMENTS})
        own = {
            "settings": _model_settings(name, model)
            | {"class_weight": configs.comparable(arguments.get("class_weight"))},
            "arrays": [arrays, {"all batches so far": so_far}],
            "configs": configs.configs_of(name, model, []) if number == 0 else {},
        }
        _compare_workers(strategy, name, model, own, ArrayValues(named or {}), {})
    calls[name] = (number + 1, so_far)


def _settings_of(
    name: str, model: Any, bound: inspect.BoundArguments
) -> dict[str, Any]:
    """Return the settings in a loop's call that affect the number and kind of steps.

    Returns:
        Dict from the name of a setting to a value that workers can compare.
    """
    arguments = bound.arguments
    settings = {
        key: configs.comparable(arguments.get(key, parameter.default))
        for key, parameter in list(bound.signature.parameters.items())[1:]
        if key not in _NOT_SETTINGS
    }
    if arguments.get("validation_data") is not None:
        settings["validation_data"] = "given"
    return _model_settings(name, model) | settings


def _model_settings(name: str, model: Any) -> dict[str, Any]:
    """Return the settings of a model and of the process that affect its steps.

    Returns:
        Dict of values that workers can compare, by the names in `_MODEL_ATTRIBUTES` and
        `_PROCESS_SETTINGS`, such as "run_eagerly" and "keras.config.max_epochs". For
        training it also has the number of weights created outside the scope.
    """
    settings = {
        key: configs.comparable(getattr(model, key)) for key in _MODEL_ATTRIBUTES
    }
    if not name.startswith("predict"):
        outside = len(scope_checks.weights_outside(model))
        settings["weights created outside `strategy.scope()`"] = outside
    return settings | {key: read() for key, read in _PROCESS_SETTINGS.items()}


def _describe_data(arguments: dict[str, Any]) -> list[dict[str, Any] | None]:
    """Describe the arrays for a loop and for its validation.

    Args:
        arguments: Dict, the arguments of the loop's method, such as `fit`, by name.

    Returns:
        List of two dicts, for the loop and for its validation: rows, shape and dtype of
        each array by its name. The first one also has "batch_size". `None` takes the
        place of data that is not arrays.
    """
    arrays = describe_arrays({name: arguments.get(name) for name in _DATA_ARGUMENTS})
    if arrays is not None:
        arrays["batch_size"] = arguments.get("batch_size") or _KERAS_BATCH_SIZE
    return [arrays, describe_arrays(_validation_parts(arguments))]


def _validation_parts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of `validation_data` by their names in messages.

    Returns:
        Dict from a name, such as `"validation_data[0]"`, to the part.
    """
    validation = arguments.get("validation_data")
    if not isinstance(validation, (tuple, list)):
        return {"validation_data": validation}
    return {f"validation_data[{i}]": part for i, part in enumerate(validation)}


def _values_of(arguments: dict[str, Any]) -> ArrayValues:
    """Return the values of the arrays for a loop and for its validation.

    `arguments` are those of the call, by name. Values are read at each call, because a
    script may shuffle an array in place.
    """
    given = {name: arguments.get(name) for name in _DATA_ARGUMENTS}
    parts = named_arrays(given), named_arrays(_validation_parts(arguments))
    return ArrayValues(
        {key: leaf for part in parts for key, leaf in (part or {}).items()}
    )


def _compare_workers(
    strategy: Any,
    name: str,
    model: Any,
    own: dict[str, Any],
    values: ArrayValues,
    extra: dict[str, Any],
) -> list[dict[str, Any]]:
    """Compare a call and its model between workers; raise on all if they differ.

    New variables get worker 0's values, and workers compare the weights that scripts
    have assigned since the last comparison.

    Args:
        strategy: A tfdp strategy of several workers.
        name: String, name of the loop or of the method for a batch.
        model: The Keras model.
        own: Dict of this worker's `"settings"`, the description of its `"arrays"`, its
            `"configs"`, and the names of its `"callbacks"`, if any.
        values: `ArrayValues` of this worker.
        extra: Dict of JSON values that workers exchange, but do not compare.

    Returns:
        List of dicts, by rank: `extra` of each worker, with further entries.
    """
    worker_group = worker_group_of(model)
    topic = f"the settings of {name}"
    created = strategy.extended.new_variables.take()

    def before(gathered: Sequence[dict[str, Any]]) -> None:
        """Give new variables worker 0's values; raise a problem with its callbacks.

        `compare` calls this before it compares the calls.

        Args:
            gathered: Sequence of each worker's `extra`: "created" is a summary of the
                variables that the worker has created since the last exchange, and
                "problem", if present, a string about its callbacks.
        """
        synchronize_created(strategy, created, [each["created"] for each in gathered])
        if problem := gathered[0].get("problem"):
            raise ValueError(problem)

    facts = [
        SharedFact("callbacks", own.get("callbacks", []), describe_mismatch),
        SharedFact(
            "settings",
            own["settings"],
            f"Workers call `{name}` with different settings. Give every worker the "
            "same arguments, and compile the model alike.",
        ),
        *_array_facts(name, own["arrays"]),
        values_fact(
            worker_group,
            topic,
            values,
            f"Workers give `{name}` arrays of different values, so that some rows "
            "would be read twice and others never.",
        ),
        SharedFact(
            "configs",
            own["configs"],
            "Workers have models, optimizers, losses, metrics or callbacks with "
            "different settings. Make them alike on every worker.",
            lambda: own["configs"],
        ),
    ]
    weights = {} if strategy.extended.generation else _weights_of(name, model)
    extra = extra | {
        "created": created.summary,
        "assigned": _digest_of_assignments(model),
        "weights": _digest_of_assigned(weights),
    }
    gathered = compare(worker_group, topic, facts, extra, before=before)
    _check_assignments(worker_group, topic, gathered, model)
    if len({each["weights"] for each in gathered}) > 1:
        # Between synchronizations of `LocalSGD` weights differ without an assignment.
        # So they are synchronized before their values are compared.
        equalize_replicas(model)
        _check_weights(worker_group, topic, weights)
    for weight in weights.values():
        weight.was_assigned = False
    return gathered


def _array_facts(name: str, arrays: list[dict[str, Any] | None]) -> list[SharedFact]:
    """Return `SharedFact`s, by which workers check that their arrays are alike.

    Args:
        name: String, name of the loop or of the method for a batch, for the error.
        arrays: List of descriptions of arrays, or `None` for data that is not arrays.

    Returns:
        List with a `SharedFact` for each item of `arrays`.
    """

    def explain_arrays(parts: dict[int, Any]) -> str:
        """Return the error about different arrays, or `""` if a worker has a dataset.

        Datasets are compared later.

        Args:
            parts: Dict from the rank of each worker to the description of its arrays,
                or to `None` for a dataset.
        """
        return "" if None in parts.values() else explain(problem, parts)

    problem = (
        f"Workers give `{name}` different arrays. Give every worker the same arrays, "
        "which tfdp divides, or a `tf.data.Dataset` of its own with "
        "`AutoShardPolicy.OFF`."
    )
    return [SharedFact("arrays", part, explain_arrays) for part in arrays]


def _weights_of(name: str, model: Any) -> dict[str, Any]:
    """Return the variables that a script may assign, if it does so on all workers.

    Args:
        name: String, name of the loop or of the method for a batch.
        model: The Keras model.

    Returns:
        Dict of `tf.Variable`s by name: the model's replicated weights and, for
        training, the learning rates that are variables.
    """
    weights = replicated_weights(model)
    if name in ("fit", "train_on_batch"):
        weights += rate_variables(model)
    pairs = [(weight.path, weight.value) for weight in weights]
    return configs.by_name([p for p in pairs if isinstance(p[1], MirroredVariable)])


def _digest_of_assigned(weights: dict[str, Any]) -> str:
    """Return a digest of the values of weights that a script has assigned.

    Only weights that were assigned outside of steps since workers last compared them
    count. It is `""` if this worker has assigned none.

    Args:
        weights: Dict, the result of `_weights_of`.
    """
    names = _assigned_names(weights)
    return digest(_values_of_weights(weights, names).fingerprints()) if names else ""


def _assigned_names(weights: dict[str, Any]) -> list[str]:
    """Return the names of weights assigned outside of steps since last compared.

    The records of assignments are not reset.

    Args:
        weights: Dict from a name to a variable, the result of `_weights_of`.
    """
    return [name for name, weight in weights.items() if weight.was_assigned]


def _values_of_weights(weights: dict[str, Any], names: Iterable[str]) -> ArrayValues:
    """Return the values of those `weights` that `names` lists, for a comparison."""
    return ArrayValues({name: tf.convert_to_tensor(weights[name]) for name in names})


def _check_weights(
    worker_group: WorkerGroup, topic: str, weights: dict[str, Any]
) -> None:
    """Raise a `ValueError` if weights that a worker has assigned differ by worker.

    Values are compared, and not who has assigned them: worker 0 may have set weights
    before they were broadcast, or have restored them after it saved others.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the name of the all-gather in messages.
        weights: Dict, the result of `_weights_of`.
    """
    assigned = worker_group.all_gather(
        f"{topic}: assigned weights", _assigned_names(weights)
    )
    chosen = set().union(*assigned)
    values = _values_of_weights(weights, [name for name in weights if name in chosen])
    topic = f"{topic}: weights"
    fingerprints = worker_group.all_gather(topic, values.fingerprints())
    if difference := find_difference(worker_group, topic, fingerprints, values):
        raise ValueError(
            "Workers have assigned different values to weights or the learning rate. "
            "Assign the same values on every worker, by the same calls of "
            "`set_weights`, `assign` and `load_weights`, with files that all workers "
            f"can read. Received: {difference}"
        )


def _digest_of_assignments(model: Any) -> str:
    """Return a digest of the values that this worker has assigned to sharded weights.

    Returns:
        String of hexadecimal digits, or `""` if no values were assigned.
    """
    records = [weight.value.assigned for weight in recorded_weights(model)]
    if not any(record.digest or record.is_mixed for record in records):
        return ""
    return digest([[record.digest, record.is_mixed] for record in records])


def _check_assignments(
    worker_group: WorkerGroup, topic: str, gathered: list[dict], model: Any
) -> None:
    """Raise a `ValueError` if workers assigned different values to a sharded weight.

    The records of assignments are cleared. If they have equal digests, no further
    message is sent.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, the name of the all-gather in messages.
        gathered: List with a dict for each worker; `"assigned"` is the result of
            `_digest_of_assignments` there.
        model: The Keras model.
    """
    if not any(each["assigned"] for each in gathered):
        return
    weights = recorded_weights(model)
    records = [weight.value.assigned for weight in weights]
    local_records = [
        [record.digest, record.is_mixed, record.text] for record in records
    ]
    records_by_worker = [local_records] * len(gathered)
    if len({each["assigned"] for each in gathered}) > 1:
        records_by_worker = worker_group.all_gather(
            f"{topic}: assigned values", local_records
        )
    problem = ""
    by_weight = zip(*records_by_worker, strict=True)
    for weight, record, entries in zip(weights, records, by_weight, strict=True):
        are_alike = all(entry[:2] == entries[0][:2] for entry in entries)
        if not problem and (not are_alike or record.is_mixed):
            described = [f"{entry[2]} on worker {r}" for r, entry in enumerate(entries)]
            problem = (
                "Workers have assigned different values to a sharded weight. Assign "
                "the same values on every worker, by the same calls of `set_weights`, "
                f"`assign` and `load_weights`. Received: {weight.path!r}, "
                f"{', '.join(described)}"
            )
        record.clear_after_comparison(are_alike=are_alike)
    if problem:
        raise ValueError(problem)
