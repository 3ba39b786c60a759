"""Weight of a replica's rows in the sums over a global batch, while its step runs.

Inside Keras's loops each replica's gradients are addends of a sum over replicas. Code
that compares replicas, or averages local models, weights each replica by its rows.
`tfdp.training.data.batch_weights` computes the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses

import tensorflow as tf

from tfdp.ground.base import program_trace, step_context


@dataclasses.dataclass(frozen=True)
class BatchWeight:
    """Weight of one replica in the sums over a global batch.

    Args:
        weight: Scalar float64 tensor, the replica's fraction of all samples. A float32
            fraction such as 1/3 would limit the precision of a float64 model.
        num_samples: Scalar float32 tensor, the number of samples of all replicas, or
            `None` if it is unknown.
    """

    weight: tf.Tensor
    num_samples: tf.Tensor | None


def use(value: BatchWeight | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread's replica has a `BatchWeight`, or none."""
    return step_context.using(batch_weight=value)


def current() -> tf.Tensor | None:
    """Return the fraction of all samples that this thread's replica has, or `None`.

    The fraction is a float64 scalar, the replica's weight in sums over a global batch,
    and `None` while a program of one device is traced, which has no replicas.
    """
    active = _active()
    is_traced = program_trace.current() is not None
    return None if active is None or is_traced else active.weight


def num_samples() -> tf.Tensor | None:
    """Return the number of samples of all replicas in this step, a float32 scalar.

    It is `None` if the number is unknown, or if this thread's replica has no weight, as
    outside of Keras's loops.
    """
    active = _active()
    return None if active is None else active.num_samples


def _active() -> BatchWeight | None:
    """Return the weight of this thread's replica, or `None` if it has none."""
    return step_context.current().batch_weight


def is_part_of_sum() -> bool:
    """Return whether this step's gradients are addends of a sum over replicas.

    They are if this thread's replica has a `BatchWeight`, as within Keras's loops.
    """
    return _active() is not None
