"""Weight of a replica's rows in the sums over a global batch, while its step runs.

Inside Keras's loops the loss of a replica is the mean over its own rows, as on one
device. With n_i of n rows its gradients, and the numbers that its step returns, are
multiplied by n_i / n before they are summed: Li et al. 2020, https://arxiv.org/abs/
2006.15704, average in the same way, with equal n_i. `tfdp.data.batch_weights` computes
the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.base import program_trace

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class BatchWeight:
    """Weight of one replica in the sums over a global batch.

    Args:
        weight: Scalar float64 tensor, the fraction of all samples that it has. In
            float32 a third, say, would limit the precision of a float64 model.
        num_samples: Scalar float32 tensor, the samples of all replicas, or `None`
            where that is unknown.
        forms: `tfdp.losses.row_forms.forms.Forms` of the step, or `None` while none is
            traced.
        weighted: Set of the `id`s of optimizers whose loss has the weight already.
        is_part_of_sum: Bool, whether gradients are parts of a sum, and need no weight.
            Defaults to `False`.
    """

    weight: tf.Tensor
    num_samples: tf.Tensor | None
    forms: Any = None
    weighted: set[int] = dataclasses.field(default_factory=set)
    is_part_of_sum: bool = False


@contextlib.contextmanager
def use(value: BatchWeight | None) -> Iterator[None]:
    """Set the weight of the replica that runs in this thread."""
    outer = _active()
    _thread.batch_weight = value
    try:
        yield
    finally:
        _thread.batch_weight = outer


def current() -> tf.Tensor | None:
    """Return the weight of the replica that runs in this thread, float64, or `None`."""
    found = _active()
    is_traced = program_trace.current() is not None
    return None if found is None or is_traced else found.weight


def weigh_loss(loss: tf.Tensor, optimizers: Iterable[Any]) -> tf.Tensor:
    """Multiply a loss that is scaled by the weight of the replica.

    In half precision the backward pass then overflows where that of one device does:
    a mean over fewer rows has larger gradients.

    Args:
        loss: Scalar tensor.
        optimizers: Iterable of the optimizers that its gradients are for.

    Returns:
        Scalar tensor like `loss`.
    """
    found = _active()
    if found is None or found.is_part_of_sum:
        return loss
    found.weighted.update(map(id, optimizers))
    return loss * tf.cast(found.weight, loss.dtype)


def weight_for(optimizer: Any) -> tf.Tensor | None:
    """Return the factor for the gradients of this thread's replica.

    Args:
        optimizer: The optimizer that they are given to.

    Returns:
        Scalar float64 tensor: the weight; or, where the loss was multiplied by it, one
        if it is above zero and else zero; or `None` where nothing is weighted.
    """
    found = _active()
    if found is None or found.is_part_of_sum:
        return None
    if id(optimizer) in found.weighted:
        return tf.cast(found.weight > 0, tf.float64)
    return found.weight


def weight_of_upstream() -> tf.Tensor | None:
    """Return the factor for gradients that are sent to other replicas.

    Returns:
        Scalar float64 tensor, or `None` where the loss has the weight already.
    """
    found = _active()
    return None if found is None or found.weighted else found.weight


def forms() -> Any:
    """Return the `Forms` of this thread's step; `None` in eager mode."""
    found = _active()
    return None if found is None else found.forms


def set_constant(tensor: tf.Tensor) -> None:
    """Note that a tensor of this thread's step has nothing of the batch in it."""
    found = forms()
    if found is not None:
        found.set_constant(tensor)


def num_samples() -> tf.Tensor | None:
    """Return the samples of all replicas in this step, or `None` where unknown."""
    found = _active()
    return None if found is None else found.num_samples


def _active() -> BatchWeight | None:
    return getattr(_thread, "batch_weight", None)


def is_part_of_sum() -> bool:
    """Return whether gradients of this thread's step are parts of a sum."""
    found = _active()
    return found is not None and found.is_part_of_sum
