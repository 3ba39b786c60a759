"""Parts of a batch: what stands for each in a program, and what a replica has of it.

Rows of a tensor stay where they are. Ragged and sparse tensors are made whole before
the step, since their values are no multiple of the rows; so are parts of another number
of rows than the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from tfdp.training.data.rows import first_tensor
from tfdp.training.program.conversions import Replica
from tfdp.training.program.facts import (
    Fact,
    Form,
    own_rows,
    static_sizes,
    whole,
    with_rows,
)
from tfdp.training.program.sizes import FREE, SPLITS, Size, rows


@dataclasses.dataclass
class StandIn:
    """What stands for a part of the batch in a program.

    Args:
        value: What the step is given.
        facts: Sequence of pairs of a placeholder of it and its `Fact`.
        held: Callable of the part and the `Replica`, which returns the values of these
            placeholders on a replica.
    """

    value: Any
    facts: Sequence[tuple[Any, Fact]] = ()
    held: Callable[[Any, Replica], Sequence[Any]] = lambda part, replica: ()


def stand_ins(
    parts: Sequence[Any], num_replicas: int, others: Collection[int] = ()
) -> list[StandIn]:
    """Return what stands for the parts of a batch, of any number of rows.

    Parts that may have another number of rows than the first one are whole.

    Args:
        parts: Sequence of what a replica has of each.
        num_replicas: Int, see `stand_in`.
        others: Collection of ints, the places of these parts; those are found beside
            whose shapes tell it. Defaults to none.
    """
    first = first_tensor(parts)
    own = None if first is None else first.shape[0]

    def is_other(place: int, part: Any) -> bool:
        if place in others or own is None:
            return place in others
        is_dense = tf.is_symbolic_tensor(part) and part.shape.rank
        return bool(is_dense) and part.shape[0] not in (None, own)

    return [
        _of_other_rows(part) if is_other(place, part) else stand_in(part, num_replicas)
        for place, part in enumerate(parts)
    ]


def _of_other_rows(part: Any) -> StandIn:
    if isinstance(part, tf.RaggedTensor):
        return _of_ragged(part, splits_size=FREE)
    fact = _whole_placeholder(part, FREE)
    return StandIn(fact[0], [fact], lambda own, replica: [replica.gather(own, 0)])


def stand_in(part: Any, num_replicas: int) -> StandIn:
    """Return what stands for a part of the batch, of any number of rows.

    Args:
        part: Tensor, ragged or sparse ones too, or another value, of a replica.
        num_replicas: Int, where static shapes tell the number of rows of the batch: the
            replicas that each have as many rows. 0 where they do not.
    """
    if isinstance(part, tf.RaggedTensor):
        return _of_ragged(part)
    if isinstance(part, tf.SparseTensor):
        return _of_sparse(part)
    if tf.is_symbolic_tensor(part):
        return _of_dense(part, num_replicas)
    return StandIn(part)


def _of_dense(part: tf.Tensor, num_replicas: int) -> StandIn:
    shape = part.shape
    if shape.rank:
        own = shape[0] if num_replicas else None
        total = None if own is None else own * num_replicas
        shape = tf.TensorShape([total, *shape[1:]])
    tensor = tf.compat.v1.placeholder(part.dtype, shape)
    sizes = static_sizes(tensor, is_free=True)
    if shape.rank == 0:
        fact = whole(sizes)
    else:
        found = None if sizes is None else with_rows(sizes, 0, 1)
        fact = Fact(Form.ROWS, sizes=found)
    return StandIn(tensor, [(tensor, fact)], lambda own, _: [own])


def _of_ragged(part: tf.RaggedTensor, splits_size: Size = SPLITS) -> StandIn:
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
    return StandIn(value, facts, _whole_ragged)


def _whole_ragged(part: tf.RaggedTensor, replica: Replica) -> list[tf.Tensor]:
    """Gather the values of all replicas, and the lengths of their rows."""
    splits = [
        tf.concat([[0], tf.cumsum(replica.gather(each[1:] - each[:-1], 0))], 0)
        for each in part.nested_row_splits
    ]
    return [replica.gather(part.flat_values, 0), *splits]


def _of_sparse(part: tf.SparseTensor) -> StandIn:
    indices = _whole_placeholder(part.indices, FREE)
    values = _whole_placeholder(part.values, FREE)
    # A value for each row of the batch: its shape has the number of rows.
    counted = tf.compat.v1.placeholder(tf.bool, [None])
    others = _whole_placeholder(part.dense_shape, FREE)
    shape = [tf.shape(counted, tf.int64)[0]] + [
        others[0][axis] if size is None else tf.constant(size, tf.int64)
        for axis, size in enumerate(part.shape[1:], start=1)
    ]
    value = tf.SparseTensor(indices[0], values[0], tf.stack(shape))
    facts = [indices, values, (counted, own_rows((rows(),))), others]
    return StandIn(value, facts, _whole_sparse)


def _whole_sparse(part: tf.SparseTensor, replica: Replica) -> list[tf.Tensor]:
    """Gather the values of all replicas, with their places among all rows."""
    before = tf.cast(replica.rows.first, tf.int64)
    shift = tf.one_hot(0, part.shape.rank or 2, before, dtype=tf.int64)
    return [
        replica.gather(part.indices + shift, 0),
        replica.gather(part.values, 0),
        tf.fill([replica.rows.own], True),
        part.dense_shape,
    ]


def _whole_placeholder(like: tf.Tensor, first: Size) -> tuple[Any, Fact]:
    """Return a placeholder for a tensor that is made whole, and its fact."""
    tensor = tf.compat.v1.placeholder(like.dtype, [None, *like.shape[1:]])
    sizes = static_sizes(tensor, is_free=True) or ()
    return tensor, whole((first, *sizes[1:]))
