"""Logs of a step for the whole global batch, alike on every worker."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.base import loops
from tfdp.training.reduction.training_group import merging_group
from tfdp.training.replicas import drift_probe
from tfdp.training.replicas.state_merge import merge_states
from tfdp.training.replicas.variables import MetricVariable


def merge_logs(strategy: Any, model: Any, outputs: Any) -> Any:
    """Merge each replica's logs into those of the global batch.

    Parts of sums, such as states of metrics, are added up, and the logs are computed
    of them. Where replicas train alone, logs within an epoch are those of this
    worker's.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained or evaluated.
        outputs: What the step returned, one value per replica.

    Returns:
        The same structure with one tensor for each value.
    """
    with timing.labelled("logs"):
        if tf.executing_eagerly():
            return _flatten_logs(_logs_of_eager_step(strategy, model, outputs))
        tail = loops.current().program_logs  # type: ignore[union-attr]
        values = [_local_values(strategy, output) for output in outputs]
        add_up = functools.partial(_add_up, strategy, model)
        return _flatten_logs(tail.compute(values, add_up))


def _logs_of_eager_step(strategy: Any, model: Any, outputs: Any) -> Any:
    """Logs of a step that has run on all rows; means where replicas train alone."""
    local = [_local_values(strategy, x) for x in tf.nest.flatten(outputs)]
    is_alone = loops.in_steps_alone()
    means = list(map(_weighted_by_rows, local)) if is_alone else []
    merged = _add_up(strategy, model, means)
    found = map(_cast_like, merged, local) if is_alone else [own[0] for own in local]
    return tf.nest.pack_sequence_as(outputs, list(found))


def mean_over_workers(worker_group: WorkerGroup, logs: Any) -> Any:
    """Average logs of replicas that train alone, at the end of an epoch.

    Args:
        worker_group: `WorkerGroup` between the workers.
        logs: Dict of numbers, those of this worker.
    """
    own = {name: np.asarray(value).tolist() for name, value in logs.items()}
    told = worker_group.all_gather("the logs of an epoch", own)
    return {name: np.mean([each[name] for each in told], axis=0) for name in own}


def _flatten_logs(logs: Any) -> Any:
    """Flatten dicts within logs, as those of compiled metrics; Keras does so later."""
    if not isinstance(logs, dict):
        return logs
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flatten_logs(value) if isinstance(value, dict) else {name: value})
    return flat


def metric_states(model: Any) -> list[Any]:
    """Return the `MetricVariable`s of a model that hold numbers."""
    variables = [v.value for metric in model.metrics for v in metric.variables]
    return [v for v in variables if isinstance(v, MetricVariable) and v.is_number]


def _add_up(strategy: Any, model: Any, states: list) -> list[tf.Tensor]:
    """Add up what all replicas have; drift probes travel along."""
    probes = drift_probe.pending(model)
    parts = [*states, *(probe.rows for probe in probes)]
    merged = merge_states(parts, ["sum"] * len(parts), merging_group(strategy))
    for probe, row in zip(probes, merged[len(states) :], strict=True):
        probe.record(row)
    return merged[: len(states)]


def _local_values(strategy: Any, value: Any) -> list:
    """Values on the local replicas, also where all returned the same object."""
    found = list(strategy.experimental_local_results(value))
    num_local = strategy.extended.num_local
    return found if len(found) == num_local else found * num_local


def _weighted_by_rows(local_values: list) -> list[tf.Tensor]:
    """Weight the values of a mean, each local replica's by its rows."""
    loop: Any = loops.current()  # there is one: a step of it has run
    total = tf.add_n(loop.batch_weights)
    shares = [tf.math.divide_no_nan(weight, total) for weight in loop.batch_weights]
    return [
        tf.math.multiply_no_nan(tf.cast(value, tf.float64), tf.cast(share, tf.float64))
        for value, share in zip(local_values, shares, strict=True)
    ]


def _cast_like(mean: tf.Tensor, local_values: list) -> tf.Tensor:
    like = tf.convert_to_tensor(local_values[0])
    return tf.cast(mean, like.dtype) if like.dtype.is_floating else mean
