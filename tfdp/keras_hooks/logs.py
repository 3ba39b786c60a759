"""Logs of a step for the whole global batch, alike on every worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.base import loops
from tfdp.collectives import timing
from tfdp.coordination.worker_group import WorkerGroup
from tfdp.replicas import drift_probe
from tfdp.replicas.state_merge import merge_states
from tfdp.replicas.variables import MetricVariable


def merge_logs(strategy: Any, model: Any, outputs: Any) -> Any:
    """Merge each replica's logs into those of the global batch.

    Metrics are computed again from the merged states of all replicas, so that
    AUC or precision are right too. Any other number that a custom step returns
    is averaged over the replicas, each by its rows. Where replicas train alone, logs
    within an epoch are those of this worker's.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained or evaluated.
        outputs: What the step returned, one value per replica.

    Returns:
        The same structure with one tensor for each value.
    """
    with timing.labelled("logs"):
        if not isinstance(outputs, dict):
            return _merge_values(strategy, model, outputs)
        return _merge_dict(strategy, model, _flatten_logs(outputs))


def _merge_dict(strategy: Any, model: Any, outputs: dict) -> dict:
    variables = [v for m in model.metrics for v in m.variables if _is_state(v)]
    states = [[part.read_value() for part in v.value.values] for v in variables]
    names = _metric_names(strategy, model, outputs, variables, states)
    raw = {name: value for name, value in outputs.items() if name not in names}

    leaves = [_local_values(strategy, x) for x in tf.nest.flatten(raw)]
    kinds = [v.value.merge for v in variables] + ["sum"] * len(leaves)
    numbers = [_weighted_by_rows(leaf) for leaf in leaves]
    merged = _merge_states(strategy, model, [*states, *numbers], kinds)
    totals = merged[len(variables) :]
    means = [_cast_like(t, leaf[0]) for t, leaf in zip(totals, leaves, strict=True)]
    logs = dict(tf.nest.pack_sequence_as(raw, means))
    if names:
        results = _metric_results(model, variables, merged[: len(variables)])
        logs.update({name: results[own] for name, own in names.items()})
    return {name: logs[name] for name in outputs}


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


def _merge_values(strategy: Any, model: Any, outputs: Any) -> Any:
    leaves = [_local_values(strategy, x) for x in tf.nest.flatten(outputs)]
    numbers = [_weighted_by_rows(leaf) for leaf in leaves]
    totals = _merge_states(strategy, model, numbers, ["sum"] * len(leaves))
    if not leaves:
        return outputs
    means = [_cast_like(t, leaf[0]) for t, leaf in zip(totals, leaves, strict=True)]
    return tf.nest.pack_sequence_as(outputs, means)


def _merge_states(
    strategy: Any, model: Any, states: list, kinds: list[str]
) -> list[tf.Tensor]:
    """Merge the states of all replicas; drift probes travel along."""
    probes = drift_probe.pending(model)
    extended = strategy.extended
    alone = loops.in_steps_alone()
    merged = merge_states(
        [*states, *(probe.rows for probe in probes)],
        [*kinds, *["sum"] * len(probes)],
        extended.own_host_group if alone else extended.host_group,
    )
    for probe, row in zip(probes, merged[len(states) :], strict=True):
        probe.record(row)
    return merged[: len(states)]


def _metric_names(
    strategy: Any,
    model: Any,
    outputs: dict,
    variables: Sequence[Any],
    states: Sequence[Sequence[tf.Tensor]],
) -> dict[str, str]:
    """Find the logs that are results of the model's metrics.

    A custom step may return a plain loss under the name of a metric that it
    never updates, or a metric's result under another name. In a traced step the
    graph tells which is which, in an eager one the value does, under its own name.

    Returns:
        Dict from the name of a log to that of the metric.
    """
    if not variables:
        return {}
    own = _metric_results(model, variables, [state[0] for state in states])
    handles = [part.handle for v in variables for part in v.value.values]
    names = {}
    for name, value in outputs.items():
        if name not in own:
            names.update(_metric_of_log(strategy, name, value, own))
            continue
        first = [_local_values(strategy, x)[0] for x in tf.nest.flatten(value)]
        if tf.executing_eagerly():
            expected = tf.nest.flatten(own[name])
            pairs = zip(first, expected, strict=False)
            is_metric = all(np.allclose(a, b, equal_nan=True) for a, b in pairs)
        else:
            is_metric = all(_reads(tensor, handles) for tensor in first)
        if is_metric:
            names[name] = name
    return names


def _metric_of_log(strategy: Any, name: str, value: Any, own: dict) -> dict[str, str]:
    """Find the metric whose result a log is under another name."""
    first = _local_values(strategy, value)[0]
    if not tf.is_symbolic_tensor(first):
        return {}
    formula = _expression(first)
    found = [
        metric
        for metric, result in own.items()
        if tf.is_symbolic_tensor(result) and _expression(result) == formula
    ]
    return {name: found[0]} if found else {}


def _expression(tensor: Any) -> Any:
    """Expression by which a traced tensor is computed from variables."""
    op = tensor.op
    if op.type == "Identity":
        return _expression(op.inputs[0])
    if op.type == "Const":
        return str(tf.get_static_value(tensor))
    if op.type == "ReadVariableOp":
        return op.inputs[0].name
    if op.type not in ("Cast", "DivNoNan", "RealDiv", "Sqrt"):
        return op.name
    return (op.type, *(_expression(source) for source in op.inputs))


def _local_values(strategy: Any, value: Any) -> list:
    """Values on the local replicas, also where all returned the same object."""
    found = list(strategy.experimental_local_results(value))
    num_local = strategy.extended.num_local
    return found if len(found) == num_local else found * num_local


def _metric_results(
    model: Any, variables: Sequence[Any], values: Sequence[Any]
) -> dict:
    """Compute the metrics as if their states were `values`."""
    mapping = list(zip(variables, values, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return model.get_metrics_result()


def _reads(tensor: Any, handles: Sequence[Any]) -> bool:
    """True if a traced tensor is computed from one of the resources."""
    if not tf.is_symbolic_tensor(tensor):
        return False
    graph = tensor.graph
    captured = {graph.capture(handle).ref() for handle in handles}
    seen, queue = set(), [tensor.op]
    while queue:
        op = queue.pop()
        if op.name in seen:
            continue
        seen.add(op.name)
        for source in op.inputs:
            if source.ref() in captured:
                return True
            queue.append(source.op)
    return False


def _is_state(variable: Any) -> bool:
    state = variable.value
    return isinstance(state, MetricVariable) and (
        state.dtype.is_floating or state.dtype.is_integer
    )


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


def _cast_like(mean: tf.Tensor, like: Any) -> tf.Tensor:
    like = tf.convert_to_tensor(like)
    return tf.cast(mean, like.dtype) if like.dtype.is_floating else mean
