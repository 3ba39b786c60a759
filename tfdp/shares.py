"""Each replica's part of the global batch, by which its gradients and logs count.

Inside Keras's loops the loss of a replica is the mean over its own rows, as on one
device. With n_i of n rows its gradients, and the numbers that its step returns, are
multiplied by n_i / n before they are summed: Li et al. 2020, https://arxiv.org/abs/
2006.15704, average in the same way, with equal n_i.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.collectives import ProcessGroup, all_reduce
from tfdp.row_forms.forms import Forms
from tfdp.rows import first_tensor, num_rows

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Share:
    """What one replica holds of a global batch.

    Args:
        weight: Scalar float64 tensor, its part of all samples. A third, say, in
            float32 would be all that a float64 model is exact to.
        samples: Scalar float32 tensor, the samples of all replicas, or `None`
            where that is unknown.
        forms: `Forms` of the tensors of the step, or `None` while none is traced.
        weighted: Set of the `id`s of optimizers whose loss has the weight already.
    """

    weight: tf.Tensor
    samples: tf.Tensor | None
    forms: Forms | None = None
    weighted: set[int] = dataclasses.field(default_factory=set)


def shares_of(
    local_batches: list,
    host_group: ProcessGroup,
    num_replicas: int,
    total: tf.Tensor | None,
) -> list[Share] | None:
    """The share of the global batch that each local replica holds.

    Args:
        local_batches: List of nests, what each local replica is given.
        host_group: `ProcessGroup` with one member for each worker.
        num_replicas: Int, on all workers.
        total: Scalar float32 tensor, the rows of the global batch, or `None` if
            workers have to ask each other.

    Returns:
        List of `Share`, whose weights sum to one over all replicas, or `None` if
        there is one replica.
    """
    if num_replicas == 1:
        return None
    firsts = [first_tensor(batch) for batch in local_batches]
    static = {None if first is None else first.shape[0] for first in firsts}
    without_data = any(first is None for first in firsts)
    all_alike = len(static) == 1 and None not in static and host_group.size == 1
    if without_data or all_alike:
        rows = None if without_data else static.pop()
        samples = None if rows is None else tf.constant(float(num_replicas * rows))
        equal = tf.constant(1.0 / num_replicas, tf.float64)
        return [Share(equal, samples)] * len(firsts)
    counts = [num_rows(first) for first in firsts]
    if total is None:
        with tf.device(host_group.devices[0]):
            total = all_reduce(tf.add_n(counts)[tf.newaxis], host_group, 0)[0]
    exact = tf.cast(total, tf.float64)
    weights = [tf.math.divide_no_nan(tf.cast(n, tf.float64), exact) for n in counts]
    return [Share(weight, total) for weight in weights]


class CountedBatch(NamedTuple):
    """What an iterator hands to Keras's step: its shares, and of how many rows.

    Every worker reads the whole global batch before it takes its rows, so that
    nobody has to be asked how many there are.
    """

    batch: Any
    num_rows: tf.Tensor


def uncounted(args: tuple) -> tuple[tuple, tf.Tensor | None]:
    """Takes the arguments of a step apart.

    Args:
        args: Tuple, of which one item may be a `CountedBatch`.

    Returns:
        Tuple of plain arguments, and the rows of the global batch or `None`.
    """
    plain = tuple(a.batch if isinstance(a, CountedBatch) else a for a in args)
    totals = [a.num_rows for a in args if isinstance(a, CountedBatch)]
    return plain, totals[0] if totals else None


@contextlib.contextmanager
def share(value: Share | None) -> Iterator[None]:
    """Sets the share of the replica that runs in this thread."""
    outer = _in_force()
    _thread.share = value
    try:
        yield
    finally:
        _thread.share = outer


def current() -> tf.Tensor | None:
    """The weight of the replica that runs in this thread, float64, or `None`."""
    found = _in_force()
    return None if found is None else found.weight


def weigh_loss(loss: tf.Tensor, optimizers: Iterable[Any]) -> tf.Tensor:
    """Multiplies a loss that is scaled by the weight of the replica.

    In half precision the backward pass then overflows where that of one device does:
    a mean over fewer rows has larger gradients.

    Args:
        loss: Scalar tensor.
        optimizers: Iterable of the optimizers that its gradients are for.

    Returns:
        Scalar tensor like `loss`.
    """
    found = _in_force()
    if found is None:
        return loss
    found.weighted.update(map(id, optimizers))
    return loss * tf.cast(found.weight, loss.dtype)


def weight_for(optimizer: Any) -> tf.Tensor | None:
    """By what the gradients of this thread's replica are multiplied.

    Args:
        optimizer: The optimizer that they are given to.

    Returns:
        Scalar float64 tensor: the weight, or only whether it is above zero where the
        loss was multiplied by it; or `None` where nothing is weighted.
    """
    found = _in_force()
    if found is None:
        return None
    if id(optimizer) in found.weighted:
        return tf.cast(found.weight > 0, tf.float64)
    return found.weight


def weight_of_upstream() -> tf.Tensor | None:
    """By what gradients that go to other replicas are still to be multiplied.

    Returns:
        Scalar float64 tensor, or `None` where the loss has the weight already.
    """
    found = _in_force()
    return None if found is None or found.weighted else found.weight


def forms() -> Forms | None:
    """How the tensors of this thread's step depend on rows; `None` in eager mode."""
    found = _in_force()
    return None if found is None else found.forms


def num_samples() -> tf.Tensor | None:
    """The samples of all replicas in this step, or `None` where unknown."""
    found = _in_force()
    return None if found is None else found.samples


def _in_force() -> Share | None:
    return getattr(_thread, "share", None)
