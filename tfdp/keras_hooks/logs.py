"""Logs of a step for the whole global batch, alike on every worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp.base import loops
from tfdp.collectives import timing
from tfdp.coordination.worker_group import WorkerGroup
from tfdp.keras_hooks.state_functions import State, state_function
from tfdp.local_steps import merging_group
from tfdp.replicas import drift_probe
from tfdp.replicas.state_merge import merge_states
from tfdp.replicas.variables import MetricVariable


class _MetricLog(NamedTuple):
    """A log that is computed from states of metrics alone.

    Args:
        states: Dict of the states by a key: the kind by which each merges, and its
            tensor on each local replica.
        compute: Callable that computes the log from a dict of the merged states.
    """

    states: dict[tuple, tuple[str, list[tf.Tensor]]]
    compute: Callable[[Mapping[tuple, tf.Tensor]], tf.Tensor]


def merge_logs(strategy: Any, model: Any, outputs: Any) -> Any:
    """Merge each replica's logs into those of the global batch.

    What is computed from states of metrics alone is computed again from the merged
    states of all replicas, so that AUC or precision are right too. Any other number
    that a custom step returns is averaged over the replicas, each by its rows. Where
    replicas train alone, logs within an epoch are those of this worker's.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained or evaluated.
        outputs: What the step returned, one value per replica.

    Returns:
        The same structure with one tensor for each value.
    """
    with timing.labelled("logs"):
        if tf.executing_eagerly():
            return _logs_of_eager_step(strategy, model, outputs)
        tail = loops.current().program_logs  # type: ignore[union-attr]
        if tail is not None:
            return _logs_of_program(strategy, model, outputs, tail)
        if not isinstance(outputs, dict):
            leaves = [_local_values(strategy, x) for x in tf.nest.flatten(outputs)]
            merged = _merge(strategy, model, [None] * len(leaves), leaves)
            return tf.nest.pack_sequence_as(outputs, merged)
        flat = _flatten_logs(outputs)
        names = [name for name in flat for _ in tf.nest.flatten(flat[name])]
        values = list(flat.values())
        leaves = [_local_values(strategy, x) for x in tf.nest.flatten(values)]
        merged = _merge(strategy, model, names, leaves)
        return dict(zip(flat, tf.nest.pack_sequence_as(values, merged), strict=True))


def _logs_of_program(strategy: Any, model: Any, outputs: list, tail: Any) -> Any:
    """Sum the parts that replicas return, and compute the logs of them."""
    values = [_local_values(strategy, output) for output in outputs]

    def add_up(parts: list) -> list:
        return _merge_states(strategy, model, parts, ["sum"] * len(parts))

    return tail.compute(values, add_up)


def _logs_of_eager_step(strategy: Any, model: Any, outputs: Any) -> Any:
    """Logs of a step that has run on all rows; means where replicas train alone."""
    local = [_local_values(strategy, x) for x in tf.nest.flatten(outputs)]
    is_alone = loops.in_steps_alone()
    means = list(map(_weighted_by_rows, local)) if is_alone else []
    merged = _merge_states(strategy, model, means, ["sum"] * len(means))
    found = map(_cast_like, merged, local) if is_alone else [own[0] for own in local]
    return tf.nest.pack_sequence_as(outputs, list(found))


def _merge(
    strategy: Any, model: Any, names: Sequence[str | None], leaves: Sequence[list]
) -> list[Any]:
    """Merge values of logs.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model.
        names: Sequence of the names of the logs, or `None`, one for each value.
        leaves: Sequence of lists, each value on the local replicas.
    """
    if not leaves:
        return []
    logs = [
        _metric_log(model, name, values)
        for name, values in zip(names, leaves, strict=True)
    ]
    states = {
        key: s for log in logs if log is not None for key, s in log.states.items()
    }
    raw = [values for log, values in zip(logs, leaves, strict=True) if log is None]
    merged = _merge_states(
        strategy,
        model,
        [*(local for _, local in states.values()), *map(_weighted_by_rows, raw)],
        [*(kind for kind, _ in states.values()), *["sum"] * len(raw)],
    )
    of_key = dict(zip(states, merged, strict=False))
    means = iter(map(_cast_like, merged[len(states) :], raw))
    return [next(means) if log is None else log.compute(of_key) for log in logs]


def mean_over_workers(worker_group: WorkerGroup, logs: Any) -> Any:
    """Average logs of replicas that train alone, at the end of an epoch.

    Args:
        worker_group: `WorkerGroup` between the workers.
        logs: Dict of numbers, those of this worker.
    """
    own = {name: np.asarray(value).tolist() for name, value in logs.items()}
    texts = worker_group.all_gather("the logs of an epoch", json.dumps(own))
    told = [json.loads(text) for text in texts]
    return {name: np.mean([each[name] for each in told], axis=0) for name in own}


def _flatten_logs(logs: dict) -> dict:
    """Flatten dicts within logs, as those of compiled metrics; Keras does so later."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flatten_logs(value) if isinstance(value, dict) else {name: value})
    return flat


def _metric_log(model: Any, name: str | None, values: list) -> _MetricLog | None:
    """Find the states of metrics that a log is computed from, if from nothing else.

    Its name says nothing: a step may return a loss of its own under the name of a
    metric that it never updates, or a metric's result under another name.
    """
    functions = [state_function(value) for value in values]
    first = functions[0]
    if first is None:
        return None
    if not first.can_compute:
        return _log_of_branches(model, name, first.states)
    replicas = [[] if each is None else each.states for each in functions]
    if any(
        list(map(_origin, each)) != list(map(_origin, replicas[0])) for each in replicas
    ):
        return None
    states = {}
    for state, *others in zip(*replicas, strict=True):
        is_last = state.value is None
        local = (
            _read(state.variable) if is_last else [s.value for s in (state, *others)]
        )
        states[state.key] = state.variable.merge, local
    return _MetricLog(states, first.compute)


def _log_of_branches(
    model: Any, name: str | None, states: Sequence[State]
) -> _MetricLog | None:
    """Find the metric with the states of a log that cannot be computed again.

    That is one with a condition in it. Of metrics that share their states it is the
    one of the log's name.
    """
    variables = metric_states(model)
    own = _metric_results(model, variables, [_read(v)[0] for v in variables])
    used = {id(state.variable) for state in states}
    found = [
        metric
        for metric, result in own.items()
        if (function := state_function(result)) is not None
        and {id(state.variable) for state in function.states} == used
    ]
    if name not in found and len(found) != 1:
        return None
    metric = name if name in found else found[0]
    keys = [State(variable).key for variable in variables]
    return _MetricLog(
        {k: (v.merge, _read(v)) for k, v in zip(keys, variables, strict=True)},
        lambda merged: _metric_results(model, variables, [merged[k] for k in keys])[
            metric
        ],
    )


def _origin(state: State) -> tuple:
    """What is the same of a state on all replicas."""
    return id(state.variable), state.value is None


def metric_states(model: Any) -> list[Any]:
    """Return the `MetricVariable`s of a model that hold numbers."""
    variables = [v.value for metric in model.metrics for v in metric.variables]
    return [v for v in variables if isinstance(v, MetricVariable) and v.is_number]


def _read(variable: Any) -> list[tf.Tensor]:
    """Read the state of a metric on each local replica."""
    return [part.read_value() for part in variable.values]


def _merge_states(
    strategy: Any, model: Any, states: list, kinds: list[str]
) -> list[tf.Tensor]:
    """Merge the states of all replicas; drift probes travel along."""
    probes = drift_probe.pending(model)
    merged = merge_states(
        [*states, *(probe.rows for probe in probes)],
        [*kinds, *["sum"] * len(probes)],
        merging_group(strategy),
    )
    for probe, row in zip(probes, merged[len(states) :], strict=True):
        probe.record(row)
    return merged[: len(states)]


def _local_values(strategy: Any, value: Any) -> list:
    """Values on the local replicas, also where all returned the same object."""
    found = list(strategy.experimental_local_results(value))
    num_local = strategy.extended.num_local
    return found if len(found) == num_local else found * num_local


def _metric_results(
    model: Any, variables: Sequence[Any], values: Sequence[Any]
) -> dict:
    """Compute the metrics as if their states were `values`."""
    new = {id(v): value for v, value in zip(variables, values, strict=True)}
    states = [v for metric in model.metrics for v in metric.variables]
    mapping = [(v, new[id(v.value)]) for v in states if id(v.value) in new]
    with keras.StatelessScope(state_mapping=mapping):
        return model.get_metrics_result()


def _is_equal(value: Any, result: Any) -> bool:
    value, result = np.asarray(value), np.asarray(result)
    return value.shape == result.shape and np.allclose(value, result, equal_nan=True)


def _weighted_by_rows(local_values: list) -> list[tf.Tensor]:
    """Weight the values of a mean, each local replica's by its rows."""
    loop = loops.current()
    weights = loop.batch_weights if loop is not None else None
    assert weights is not None  # with one replica nothing is merged
    if loops.in_steps_alone():
        total = tf.add_n(weights)
        weights = [tf.math.divide_no_nan(weight, total) for weight in weights]
    return [
        tf.math.multiply_no_nan(_as_number(value), tf.cast(weight, tf.float64))
        for value, weight in zip(local_values, weights, strict=True)
    ]


def _as_number(value: Any) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(value), tf.float64)


def _cast_like(mean: tf.Tensor, local_values: list) -> tf.Tensor:
    like = tf.convert_to_tensor(local_values[0])
    return tf.cast(mean, like.dtype) if like.dtype.is_floating else mean
