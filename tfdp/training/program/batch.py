"""Placeholders for the parts of a batch, and the values that a replica feeds to them.

The parts are the tensors among the arguments of a step, such as `x` and `y`.

Rows of a dense tensor stay on their replica. Ragged and sparse tensors are gathered
before the step, since their number of values is not a multiple of the number of rows:
they are whole, the same on every replica. So are parts with another number of rows
than the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdp.training.data.rows import first_tensor
from tfdp.training.program.facts import (
    Fact,
    Form,
    own_rows,
    static_sizes,
    whole,
    with_rows,
)
from tfdp.training.program.replica import Replica
from tfdp.training.program.sizes import FREE, SPLITS, Size, rows


@dataclasses.dataclass
class BatchPlaceholder:
    """Placeholder of one part of the batch, such as `x` or `y`, in a traced step.

    Args:
        value: The part as the traced step receives it: a symbolic tensor, a composite
            of symbolic tensors, or another value, unchanged.
        facts: Sequence of pairs of a placeholder tensor from which `value` is built,
            and its `Fact`: how a replica holds that tensor, and its sizes.
        local_values: Callable that takes the part of this replica's batch and the
            `Replica`, and returns the tensors that the replica feeds to the
            placeholders, one for each pair of `facts`.
    """

    value: Any
    facts: Sequence[tuple[Any, Fact]] = ()
    local_values: Callable[[Any, Replica], Sequence[Any]] = lambda part, replica: ()


def batch_placeholders(
    parts: Sequence[Any], num_replicas: int, others: Collection[int] = ()
) -> list[BatchPlaceholder]:
    """Create one placeholder for each part of a batch, such as `x` and `y`, in order.

    A part whose number of rows may differ from that of the first part is gathered:
    every replica receives all its rows.

    Args:
        parts: Sequence of tensors and other values, the parts on one replica.
        num_replicas: Int, number of replicas, if all have the same static number of
            rows: placeholders then have their static total. Or 0 to leave the number of
            rows of the placeholders open.
        others: Collection of ints, positions of parts whose number of rows may differ
            from that of the first part. Parts whose static shapes differ need not be
            listed. Defaults to none.

    Returns:
        List of `BatchPlaceholder`, one for each part.
    """
    first = first_tensor(parts)
    own = None if first is None else first.shape[0]

    def is_other(position: int, part: Any) -> bool:
        """Return whether a part may have another number of rows than the first part.

        It may if `others` has its position, or if its static number of rows and that of
        the first part are known and differ.
        """
        if position in others or own is None:
            return position in others
        is_dense = tf.is_symbolic_tensor(part) and part.shape.rank
        return bool(is_dense) and part.shape[0] not in (None, own)

    return [
        _of_other_num_rows(part, num_replicas)
        if is_other(place, part)
        else placeholder_of(part, num_replicas)
        for place, part in enumerate(parts)
    ]


def _of_other_num_rows(part: Any, num_replicas: int) -> BatchPlaceholder:
    """Create the placeholder of a part with another number of rows than the first part.

    The part is gathered before the step, so every replica receives all its rows.

    Args:
        part: Dense or ragged tensor, the part on one replica.
        num_replicas: Int, as for `placeholder_of`.
    """
    if isinstance(part, tf.RaggedTensor):
        return _of_ragged(part, splits_size=FREE)
    fact = _whole_placeholder(part, FREE, _static_total(part, num_replicas))
    return BatchPlaceholder(
        fact[0], [fact], lambda own, replica: [replica.gather(own, 0)]
    )


def placeholder_of(part: Any, num_replicas: int) -> BatchPlaceholder:
    """Create the placeholder for one part of the batch.

    Args:
        part: Dense, ragged or sparse tensor, or another value, on one replica. Another
            value becomes the `value` of the result, without a placeholder.
        num_replicas: Int, number of replicas if all have the same static number of
            rows: a dense placeholder then has their static total. Or 0 if the number of
            rows of the placeholder is not static.
    """
    if isinstance(part, tf.RaggedTensor):
        return _of_ragged(part)
    if isinstance(part, tf.SparseTensor):
        return _of_sparse(part)
    if tf.is_symbolic_tensor(part):
        return _of_dense(part, num_replicas)
    return BatchPlaceholder(part)


def _of_dense(part: tf.Tensor, num_replicas: int) -> BatchPlaceholder:
    """Create the placeholder of a dense tensor, whose rows stay on their replicas.

    Args:
        part: Dense tensor on one replica. A scalar has no rows: it is the same on all.
        num_replicas: Int, number of replicas, if all have the same static number of
            rows; or 0 to leave the number of rows of the placeholder open.
    """
    shape = part.shape
    if shape.rank:
        shape = tf.TensorShape([_static_total(part, num_replicas), *shape[1:]])
    tensor = tf.compat.v1.placeholder(part.dtype, shape)
    sizes = static_sizes(tensor, is_free=True)
    if shape.rank == 0:
        fact = whole(sizes)
    else:
        row_sizes = None if sizes is None else with_rows(sizes, 0, 1)
        fact = Fact(Form.ROWS, sizes=row_sizes)
    return BatchPlaceholder(tensor, [(tensor, fact)], lambda own, _: [own])


def _static_total(part: tf.Tensor, num_replicas: int) -> int | None:
    """Return the static number of rows of all replicas, or `None` if not static.

    It is `None` as well if `num_replicas` is 0. `part` is a tensor on one replica.
    """
    own = part.shape[0] if num_replicas else None
    return None if own is None else own * num_replicas


def _of_ragged(part: tf.RaggedTensor, splits_size: Size = SPLITS) -> BatchPlaceholder:
    """Create the placeholder of a ragged tensor, which each replica gathers whole.

    Args:
        part: Ragged tensor on one replica.
        splits_size: `Size` (the number of elements) of its outermost row splits.
            Defaults to the number of rows of the batch plus one.
    """
    splits = part.nested_row_splits
    facts = [
        _whole_placeholder(part.flat_values, FREE),
        *(
            _whole_placeholder(each, FREE if level else splits_size)
            for level, each in enumerate(splits)
        ),
    ]
    spec = tf.RaggedTensorSpec(
        [None, *part.shape[1:]], part.dtype, part.ragged_rank, splits[0].dtype
    )
    value = tf.nest.pack_sequence_as(
        spec, [tensor for tensor, _ in facts], expand_composites=True
    )
    return BatchPlaceholder(value, facts, _gather_ragged)


def _gather_ragged(part: tf.RaggedTensor, replica: Replica) -> list[tf.Tensor]:
    """Gather a ragged tensor from all replicas, with row splits of the whole batch.

    Args:
        part: Ragged tensor, the rows of this replica.
        replica: `Replica` that gathers.

    Returns:
        List of the flat values, and the row splits of each ragged axis.
    """
    splits = [
        tf.concat([[0], tf.cumsum(replica.gather(each[1:] - each[:-1], 0))], 0)
        for each in part.nested_row_splits
    ]
    return [replica.gather(part.flat_values, 0), *splits]


def _of_sparse(part: tf.SparseTensor) -> BatchPlaceholder:
    """Create the placeholder of a sparse tensor, which each replica gathers whole."""
    indices = _whole_placeholder(part.indices, FREE)
    values = _whole_placeholder(part.values, FREE)
    # The plan of a step follows the number of rows in the shapes of tensors, not in
    # values that are fed. So the dense shape of the sparse tensor begins with the size
    # of a placeholder that has one element for each row.
    one_per_row = tf.compat.v1.placeholder(tf.bool, [None])
    others = _whole_placeholder(part.dense_shape, FREE)
    shape = [tf.shape(one_per_row, tf.int64)[0]] + [
        others[0][axis] if size is None else tf.constant(size, tf.int64)
        for axis, size in enumerate(part.shape[1:], start=1)
    ]
    value = tf.SparseTensor(indices[0], values[0], tf.stack(shape))
    facts = [indices, values, (one_per_row, own_rows((rows(),))), others]
    return BatchPlaceholder(value, facts, _gather_sparse)


def _gather_sparse(part: tf.SparseTensor, replica: Replica) -> list[tf.Tensor]:
    """Gather a sparse tensor from all replicas, with indices into the whole batch.

    Args:
        part: Sparse tensor, the rows of this replica.
        replica: `Replica` that gathers.

    Returns:
        List of four tensors: the indices and the values of all replicas; a bool vector
        with an element for each row of this replica, by whose size the program knows
        the number of rows; and the dense shape on this replica.
    """
    before = tf.cast(replica.rows.first, tf.int64)
    shift = tf.one_hot(0, part.shape.rank or 2, before, dtype=tf.int64)
    return [
        replica.gather(part.indices + shift, 0),
        replica.gather(part.values, 0),
        tf.fill([replica.rows.own], True),
        part.dense_shape,
    ]


def _whole_placeholder(
    like: tf.Tensor, first: Size, total: int | None = None
) -> tuple[Any, Fact]:
    """Create a placeholder for a tensor that is gathered before the step.

    Args:
        like: Tensor of one replica, with the dtype and the shape of the placeholder
            apart from the first axis.
        first: `Size` of the first axis of the placeholder.
        total: Int, static size of that axis; or `None`, the default, to leave it open.

    Returns:
        Pair of the placeholder and its `Fact`, which says that all replicas hold the
        same value, and gives its shape.
    """
    tensor = tf.compat.v1.placeholder(like.dtype, [total, *like.shape[1:]])
    sizes = static_sizes(tensor, is_free=True) or ()
    return tensor, whole((first, *sizes[1:]))
