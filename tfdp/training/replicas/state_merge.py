"""Merge of the replicas' states: metrics, moving statistics and logs.

These tensors are small. They are merged on the host of each worker first, then across
workers by a single collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import Member, ProcessGroup

# The dtype of the collective: float64 holds the counts of integer metrics exactly.
_DTYPE = tf.float64


def merge_states(
    states: Sequence[Sequence[tf.Tensor]],
    kinds: Sequence[str],
    host_group: ProcessGroup,
) -> list[tf.Tensor]:
    """Merge metric states and other small tensors over all replicas of all workers.

    Args:
        states: Sequence with, for each state, its tensors on the local replicas.
        kinds: Sequence with the reduction of each state: `"sum"`, `"max"` or `"min"`.
        host_group: `ProcessGroup` with one member for each worker.

    Returns:
        List of merged tensors, one for each state, with its shape and dtype.
    """
    merged: list[Any] = [None] * len(states)
    with tf.device(host_group.devices[0]):
        for kind in ("sum", "max", "min"):
            positions = [i for i, k in enumerate(kinds) if k == kind]
            if positions:
                values = _merge([states[i] for i in positions], kind, host_group)
                for index, value in zip(positions, values, strict=True):
                    merged[index] = value
    return merged


def average_statistics(
    variables: Sequence[Any],
    weights: Sequence[tf.Tensor],
    host_group: ProcessGroup,
    add_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> None:
    """Set moving statistics to their weighted mean over all replicas.

    Args:
        variables: Sequence of mirrored variables.
        weights: Sequence of scalar tensors, one for each local replica, that
            sum to one over all replicas. A replica of weight zero has seen no
            samples, and its statistics may be NaN.
        host_group: `ProcessGroup` with one member for each worker.
        add_up: Callable that sums a tensor over the workers, or `None` for an
            all-reduce. Defaults to `None`.
    """
    with tf.device(host_group.devices[0]):
        states = [
            [
                tf.math.multiply_no_nan(
                    tf.cast(part.read_value(), _DTYPE), tf.cast(w, _DTYPE)
                )
                for part, w in zip(v.values, weights, strict=True)
            ]
            for v in variables
        ]
        means = _merge(states, "sum", host_group, add_up)
    for variable, mean in zip(variables, means, strict=True):
        for part in variable.values:
            with tf.device(part.device):
                part.assign(tf.cast(mean, variable.dtype))


def _merge(
    states: Sequence[Sequence[tf.Tensor]],
    kind: str,
    host_group: ProcessGroup,
    add_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> list[tf.Tensor]:
    """Merge states by one reduction, with a single collective.

    Args:
        states: Sequence with, for each state, its tensors on the local replicas.
        kind: String, the reduction: `"sum"`, `"max"` or `"min"`.
        host_group: `ProcessGroup` with one member for each worker.
        add_up: Callable that sums a tensor over the workers, or `None` for an
            all-reduce. Defaults to `None`.

    Returns:
        List of the merged tensors, one for each state, with its shape and dtype.
    """
    by_replica = zip(*states, strict=True)
    # All states of a replica are one flat tensor, so that one collective merges them.
    rows = [
        tf.concat([_flatten(tensor) for tensor in tensors], axis=0)
        for tensors in by_replica
    ]
    if kind == "sum":
        add_up = add_up or Member(host_group, 0).all_reduce
        total = add_up(tf.add_n(rows))
    else:
        reduce = tf.reduce_max if kind == "max" else tf.reduce_min
        local = reduce(tf.stack(rows), axis=0)
        total = reduce(Member(host_group, 0).all_gather(local[tf.newaxis]), axis=0)
    parts = tf.split(total, [_size(tensors[0]) for tensors in states])
    return [_unflatten(t, like=s[0]) for t, s in zip(parts, states, strict=True)]


def _flatten(tensor: tf.Tensor) -> tf.Tensor:
    """Return the elements of a state as a float64 vector.

    The real parts of complex elements come before all imaginary parts.
    """
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)])
    return tf.reshape(tf.cast(tensor, _DTYPE), [-1])


def _unflatten(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Return the state with the shape and dtype of `like`, given its elements."""
    if like.dtype.is_complex:
        flat = tf.complex(*tf.split(flat, 2))
    return tf.cast(tf.reshape(flat, tf.shape(like)), like.dtype)


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    """Return the length of `_flatten(tensor)`, an int if the shape is static."""
    count = tensor.shape.num_elements()
    return (tf.size(tensor) if count is None else count) * (1 + tensor.dtype.is_complex)
