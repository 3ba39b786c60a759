"""Logs of a step over the global batch, the same on every worker."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import timing
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground._compat import keras_model
from tfdp.ground.base import loops
from tfdp.training.reduction.training_group import merging_group
from tfdp.training.replicas.state_merge import merge_states
from tfdp.training.replicas.variables import MetricVariable
from tfdp.training.step.step import active


def merge_logs(strategy: Any, model: Any, outputs: Any) -> Any:
    """Merge each replica's logs into those of the global batch.

    Partial sums, such as the states of metrics, are summed over the replicas, and the
    logs are computed from the sums. Where groups of replicas update independently, only
    workers whose replicas train together have common logs within an epoch.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained or evaluated.
        outputs: Nest of per-replica values, the outputs of the step.

    Returns:
        Nest of the same structure, with one tensor for each value.
    """
    with timing.labelled("logs"):
        if tf.executing_eagerly():
            return _flatten_logs(_logs_of_eager_step(strategy, model, outputs))
        tail = loops.current().program_logs  # type: ignore[union-attr]
        values = [_local_values(strategy, output) for output in outputs]
        sum_over_replicas = functools.partial(_sum_over_replicas, strategy, model)
        return _flatten_logs(tail.compute(values, sum_over_replicas))


def _logs_of_eager_step(strategy: Any, model: Any, outputs: Any) -> Any:
    """Return the logs of an eager step, which has run on the rows of all replicas.

    Where groups of replicas update independently, each log becomes a mean of the
    replicas' logs, weighted by their rows. Otherwise the step has computed the logs of
    the global batch already.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model.
        outputs: Nest of per-replica values, the logs that the step has returned.

    Returns:
        Nest with the structure of `outputs`, with one tensor for each value.
    """
    local = [_local_values(strategy, x) for x in tf.nest.flatten(outputs)]
    if loops.independent_groups() is None:
        _sum_over_replicas(strategy, model, [])
        values = [own[0] for own in local]
    else:
        # Only steps of a loop have logs, so the loop is not `None`.
        loop: Any = loops.current()
        states = [_weighted(own, loop.batch_weights) for own in local]
        *sums, total = _sum_over_replicas(
            strategy, model, [*states, loop.batch_weights]
        )
        means = [
            tf.math.divide_no_nan(each, tf.cast(total, each.dtype)) for each in sums
        ]
        values = list(map(_cast_like, means, local))
    return tf.nest.pack_sequence_as(outputs, values)


def mean_over_workers(worker_group: WorkerGroup, logs: Any) -> Any:
    """Average the logs of an epoch over the workers, each of which has its own rows.

    Args:
        worker_group: `WorkerGroup` between the workers.
        logs: Dict of numbers, the logs of this worker.

    Returns:
        Dict of the means, with the names in `logs`.
    """
    numbers = {name: np.asarray(value).tolist() for name, value in logs.items()}
    gathered = worker_group.all_gather("the logs of an epoch", numbers)
    return {
        name: np.mean([each[name] for each in gathered], axis=0) for name in numbers
    }


def _flatten_logs(logs: Any) -> Any:
    """Return logs with nested dicts, as of compiled metrics, merged as in Keras.

    Logs other than a dict are returned unchanged.
    """
    if not isinstance(logs, dict):
        return logs
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat.update(_flatten_logs(value) if isinstance(value, dict) else {name: value})
    return flat


def metric_states(model: Any) -> list[Any]:
    """Return those `MetricVariable`s of a model's metrics that a read merges."""
    variables = [v.value for v in keras_model.metric_variables(model)]
    return [v for v in variables if isinstance(v, MetricVariable) and v.is_merged]


def _sum_over_replicas(strategy: Any, model: Any, states: list) -> list[tf.Tensor]:
    """Sum states over all replicas, and values of features in the same all-reduce.

    A feature is an active `LoopFeature`, which takes part in the step. It gives its
    values by `values_to_sum`, and receives their sum by `take_sum`.

    Args:
        strategy: A tfdp strategy.
        model: The Keras model that is trained or evaluated.
        states: List with, for each state, its tensors on the local replicas.

    Returns:
        List of the sum of each state.
    """
    found = [(feature, feature.values_to_sum(model)) for feature in active.active()]
    summed = [(feature, values) for feature, values in found if values]
    parts = [*states, *(values for _, values in summed)]
    merged = merge_states(parts, ["sum"] * len(parts), merging_group(strategy))
    for (feature, _), total in zip(summed, merged[len(states) :], strict=True):
        feature.take_sum(total)
    return merged[: len(states)]


def _local_values(strategy: Any, value: Any) -> list:
    """Return a list with each local replica's value of the per-replica `value`.

    TensorFlow merges identical values into one, which the list then repeats.
    """
    values = list(strategy.experimental_local_results(value))
    num_local = strategy.extended.num_local
    return values if len(values) == num_local else values * num_local


def _weighted(local_values: list, weights: list[tf.Tensor]) -> list[tf.Tensor]:
    """Multiply the means of the local replicas by the weights of their rows.

    Args:
        local_values: List with the mean of one log on each local replica, a tensor.
        weights: List of scalar tensors, one for each local replica.

    Returns:
        List of the products, float64 tensors.
    """
    return [
        tf.math.multiply_no_nan(tf.cast(value, tf.float64), tf.cast(weight, tf.float64))
        for value, weight in zip(local_values, weights, strict=True)
    ]


def _cast_like(mean: tf.Tensor, local_values: list) -> tf.Tensor:
    """Cast a mean to the dtype of the values that it averages, if that is floating."""
    like = tf.convert_to_tensor(local_values[0])
    return tf.cast(mean, like.dtype) if like.dtype.is_floating else mean
