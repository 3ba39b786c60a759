"""Sums of what replicas have learned, each by its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.training.reduction.fusion import weighted
from tfdp.training.reduction.gradient_reducer import GradientReducer
from tfdp.training.reduction.reducer import Reducer


def new_reducer(
    strategy: Any, compression: Any, group: ProcessGroup | None = None
) -> Reducer:
    """Make the reducer of pseudo-gradients, on all workers.

    What its compressors keep lies with that of the strategy's reducer, so that
    checkpoints hold both.

    Args:
        strategy: A tfdp strategy.
        compression: As in `CommunicationOptions`.
        group: `ProcessGroup` of all replicas, or `None` for the strategy's. Defaults
            to `None`.
    """
    extended = strategy.extended
    whole = extended.reducer
    # Buckets are not tuned: a compressor keeps something for each.
    bucket_mb = whole.options.bucket_bytes / 2**20
    options = dataclasses.replace(
        whole.options, compression=compression, bucket_mb=bucket_mb
    )
    return Reducer(
        group or extended.group,
        whole.first_rank,
        options,
        extended.worker_group,
        extended.algorithm_selector.with_options(options),
        residuals=whole.residuals,
        kind="exchange",
    )


def sums_by_share(
    reducer: GradientReducer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[Any],
    share: tf.Tensor,
    *,
    compresses: bool,
) -> list[tf.Tensor]:
    """Sum pseudo-gradients over all replicas, each of which counts by its share.

    Args:
        reducer: `GradientReducer` of all replicas.
        gradients: Sequence of tensors, this replica's.
        variables: Sequence of the trained Keras variables that they are for.
        share: Scalar tensor; the shares of all replicas add up to one.
        compresses: Bool, whether the reducer may round them.
    """
    share = tf.cast(share, tf.float64)
    if not compresses:
        return reducer.sum([weighted(gradient, share) for gradient in gradients])
    reduced = reducer.reduce_gradients(
        list(gradients), list(variables), may_sum=False, weight=share
    )
    return reduced.gradients()


def sums_by_samples(
    reducer: GradientReducer,
    samples: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[Any],
    *,
    compresses: bool,
) -> list[tf.Tensor]:
    """Sum pseudo-gradients over all replicas, each of which counts by its samples.

    Args:
        reducer: `GradientReducer` of all replicas.
        samples: Scalar tensor, those of this replica.
        gradients: Sequence of tensors, this replica's.
        variables: Sequence of the trained Keras variables that they are for.
        compresses: Bool, whether the reducer may round them.
    """
    samples = tf.cast(samples, tf.float64)
    (total,) = reducer.sum([samples])
    share = tf.math.divide_no_nan(samples, total)
    return sums_by_share(reducer, gradients, variables, share, compresses=compresses)
