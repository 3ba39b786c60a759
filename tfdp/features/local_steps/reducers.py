"""Gradient reducers within a node, and weighted sums of pseudo-gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import ProcessGroup
from tfdp.communication.coordination.checks import check_same_variables
from tfdp.ground._compat import tf_distribute
from tfdp.training.reduction.fusion import weighted
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer


class NodeReducers:
    """Gradient reducers over the nodes of local replicas, each created once.

    All workers compare their variables at the first request of a reducer, and not when
    one is created: nodes of one replica create none, and workers trace steps again at
    different times.

    Args:
        variables: Sequence of the trained Keras variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._is_compared = False
        self._reducers: dict[int, Reducer] = {}

    def of_replica(self, strategy: Any, context: Any) -> GradientReducer:
        """Return the gradient reducer over the node of the running replica.

        Args:
            strategy: A tfdp strategy.
            context: Replica context of the running replica.

        Raises:
            ValueError: In eager mode, with several replicas in this process; or if a
                worker trains other variables.
        """
        extended = strategy.extended
        whole = extended.reducer
        nodes = [sorted(positions) for positions in whole.group.nodes]
        replica = tf_distribute.local_replica_id(context)
        if replica == 0 and not self._is_compared:
            self._is_compared = True
            check_same_variables(
                extended.worker_group, "first training step", self._variables, "trains"
            )
        group = whole.group.split(nodes)[replica]
        if group is None or group.size == 1:
            return GradientReducer()
        if tf.executing_eagerly() and len(group.devices) > 1:
            raise ValueError(
                "Replicas of one process cannot reduce within their node while they "
                "run eagerly, one after the other. Remove `run_eagerly=True`."
            )
        if group.key not in self._reducers:
            setup = group, whole.first_rank, whole.options, extended.worker_group
            self._reducers[group.key] = Reducer(*setup, compares=False)
        return ReplicaReducer(self._reducers[group.key], context)


def new_reducer(
    strategy: Any, compression: Any, group: ProcessGroup | None = None
) -> Reducer:
    """Create the reducer of pseudo-gradients; call it on all workers.

    Pseudo-gradients are the changes that local updates make to weights. Their reducer
    shares the residual store of the strategy's reducer, so that checkpoints contain the
    residuals of both.

    Args:
        strategy: A tfdp strategy.
        compression: Compression as in `CommunicationOptions`.
        group: `ProcessGroup` of all replicas, or `None` for the strategy's. Defaults
            to `None`.
    """
    extended = strategy.extended
    whole = extended.reducer
    # An explicit `bucket_mb` excludes this reducer from tuning: a compressor keeps
    # residuals by bucket, so the buckets must not change.
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
    share: tf.Tensor,
    compressed: Sequence[Any] | None,
) -> list[tf.Tensor]:
    """Sum pseudo-gradients over all replicas, weighted by shares.

    Args:
        reducer: `GradientReducer` of all replicas.
        gradients: Sequence of tensors, pseudo-gradients of this replica.
        share: Scalar float64 tensor, weight of this replica; the weights add up to 1.
        compressed: Sequence of the corresponding trained Keras variables if the reducer
            compresses pseudo-gradients, or `None`.
    """
    if compressed is None:
        return reducer.sum([weighted(gradient, share) for gradient in gradients])
    reduced = reducer.reduce_gradients(
        list(gradients), list(compressed), may_sum=False, weight=share
    )
    return reduced.gradients()


def sums_by_samples(
    reducer: GradientReducer,
    samples: tf.Tensor,
    gradients: Sequence[tf.Tensor],
    compressed: Sequence[Any] | None,
) -> list[tf.Tensor]:
    """Sum pseudo-gradients over all replicas, each times its fraction of all samples.

    Args:
        reducer: `GradientReducer` of all replicas.
        samples: Scalar tensor, number of samples of this replica.
        gradients: Sequence of tensors, pseudo-gradients of this replica.
        compressed: Sequence of the corresponding trained Keras variables if the reducer
            compresses pseudo-gradients, or `None`.
    """
    samples = tf.cast(samples, tf.float64)
    (total,) = reducer.sum([samples])
    share = tf.math.divide_no_nan(samples, total)
    return sums_by_share(reducer, gradients, share, compressed)
