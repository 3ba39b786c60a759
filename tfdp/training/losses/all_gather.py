"""`tfdp.all_gather`: gathers the rows of all replicas, with gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.communication.collectives.gather import gather_first_axis
from tfdp.ground._compat import keras_model, tf_distribute
from tfdp.ground.base import program_trace
from tfdp.ground.base.context import in_tfdp_scope, replica_context


def all_gather(value: Any) -> tf.Tensor:
    """Concatenate the rows of all replicas, with gradients to each of them.

    Call it in a function that runs under `strategy.run`. There a loss that compares
    the samples of a batch with each other, such as one with in-batch negatives, sees
    only the rows of its replica. Computed from the gathered rows, it is the loss of the
    global batch on each replica.

    It returns `value` unchanged on one device, and in a step of `fit`, `evaluate` and
    `predict`, which sees the global batch as on one device.

    Args:
        value: Tensor with the rows of this replica along its first axis. The number of
            rows may differ between replicas; the other dimensions must be equal.

    Returns:
        Tensor with the rows of all replicas, in the order of the global batch.

    Raises:
        ValueError: If `value` is a scalar, or the call is outside of a replica, such as
            directly in `strategy.scope()`.

    Example:

    >>> import tfdp
    >>> strategy = tfdp.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> def step():
    ...     rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    ...     return tfdp.all_gather(tf.fill([rank + 1], rank))
    >>> results = strategy.run(tf.function(step))
    >>> [result.numpy().tolist() for result in strategy.experimental_local_results(results)]
    [[0, 1, 1], [0, 1, 1]]

    Source: the all-gather of Message Passing Interface Forum, MPI, section 6.7,
    https://www.mpi-forum.org/docs/; the gradient is its adjoint, a reduce-scatter.
    """  # noqa: E501
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        raise ValueError(
            "`tfdp.all_gather` concatenates rows, and a scalar has none. Received: "
            f"value={value}"
        )
    if program_trace.current() is not None:
        return value
    if not in_tfdp_scope() or tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return value
    if keras_model.is_built_symbolically():
        # While a model is built symbolically, twice the rows stand in for the rows of
        # all replicas, whose number is not known.
        return tf.concat([value, value], axis=0)
    context = replica_context()
    if context is None:
        raise ValueError(
            "`tfdp.all_gather` is for code that runs on each replica: a `train_step`, "
            "a loss, the `call` of a layer, or what is given to `strategy.run`."
        )
    return _gather_with_gradient(value, context)


def _gather_with_gradient(value: tf.Tensor, context: Any) -> tf.Tensor:
    """Gather rows; the gradient is the sum of all replicas' gradients for them.

    Args:
        value: Tensor with the rows of this replica.
        context: `tf.distribute.ReplicaContext` of this replica.
    """
    rank = context.replica_id_in_sync_group

    @tf.custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        """Return the rows of all replicas, and a function for their gradient.

        Returns:
            Tuple of the rows of all replicas, and the function `gradient`.
        """
        joined, counts = _gather_rows(rows, context)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            """Sum the gradients of all replicas for the rows of this replica.

            `upstream` is this replica's gradient for the rows of all.
            """
            total = context.all_reduce(tf.distribute.ReduceOp.SUM, upstream)
            begin = tf.reduce_sum(counts[:rank])
            piece = tf.reshape(total, [-1])[begin : begin + tf.size(rows)]
            return tf.reshape(piece, tf.shape(rows))

        return joined, gradient

    return gather(value)


def _gather_rows(rows: tf.Tensor, context: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Gather the rows of all replicas, and each replica's number of elements.

    Args:
        rows: Tensor with the rows of this replica.
        context: `tf.distribute.ReplicaContext` of this replica.

    Returns:
        Tuple of the rows of all replicas, and an int32 tensor of shape
        `[num_replicas]`, the number of elements of each replica's rows.
    """
    if tf.executing_eagerly():
        # Eager replicas of a process run one after another. `context.all_gather` waits
        # for all of them by a merge call, which the group's own collectives do not. If
        # all replicas pass one object, it gathers only one copy, so rows are copied.
        rows, sizes = tf.identity(rows), tf.size(rows)[tf.newaxis]
        return context.all_gather(rows, axis=0), context.all_gather(sizes, axis=0)
    reducer = tf.distribute.get_strategy().extended.reducer
    return gather_first_axis(
        rows,
        reducer.group,
        tf_distribute.local_replica_id(context),
        context.replica_id_in_sync_group,
    )
