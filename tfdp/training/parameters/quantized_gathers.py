"""Units of sharded parameters that travel in 8 bits an element (qwZ).

Each replica rounds its part of a parameter, in blocks that have nothing of another
part, and all of them, the owner too, compute with what the codes decode to. The part
itself stays as it is: what rounding takes from it is there for the next update.

    part of each member, padded to whole blocks -> codes and scales, one row an owner
      -> all-gather -> decode -> the parts of each member, end to end

Source: Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.param_groups import path_of
from tfdp.ground.plans.units import UnitOptions
from tfdp.training.compression.block_code import WORD_BYTES, BlockCode
from tfdp.training.parameters.sharded_parameter import ShardedParameter

_CODE = BlockCode()


def travels_quantized(parameter: ShardedParameter, options: UnitOptions) -> bool:
    """True if a parameter is rounded where its unit is gathered.

    Vectors, such as biases and the factors of a normalization, are not: they are few,
    and layers are sensitive to them. Nor is what has fewer elements than a block for
    each owner, and would be mostly padding.

    Args:
        parameter: `ShardedParameter`.
        options: `UnitOptions` of its unit.
    """
    dtype = parameter.dtype
    is_wide = dtype.is_floating and dtype.size >= tf.float32.size
    is_large = parameter.num_elements >= _CODE.block * len(parameter.ranges)
    is_asked_for = options.gather_compression is not None
    return is_asked_for and is_wide and is_large and len(parameter.whole_shape) > 1


def check_constraints(variables: Sequence[Any], options: UnitOptions) -> None:
    """Check that no constraint would write rounded values into a parameter.

    Args:
        variables: Sequence of Keras variables, trained ones.
        options: `UnitOptions`.

    Raises:
        ValueError: If a variable that may be rounded has a constraint.
    """
    for variable in variables if options.gather_compression else ():
        if variable.constraint is not None and len(variable.shape) > 1:
            raise ValueError(
                "A constraint is computed from a whole parameter, which "
                f"`gather_compression={options.gather_compression!r}` rounds, and "
                "would keep what was rounded. Leave out one of them. "
                f"Received: {path_of(variable)!r} with {variable.constraint}"
            )


def own_words(members: Sequence[ShardedParameter], replica: int) -> tf.Tensor:
    """Encode what a replica has of some parameters.

    Args:
        members: Sequence of `ShardedParameter`.
        replica: Int, index of the replica among the local ones.

    Returns:
        Tensor of shape `[num_words]`, int32, as long on all replicas.
    """
    parts = [_compat.local_value(parameter, replica) for parameter in members]
    padded = [_whole_blocks(part.read_value()) for part in parts if _size(part)]
    missing = _row_size(members) - sum(part.shape[0] for part in padded)
    row = tf.concat([*padded, tf.zeros([missing])], axis=0)
    words, _ = _CODE.encode(row[tf.newaxis])
    return words[0]


def decoded(members: Sequence[ShardedParameter], words: tf.Tensor) -> list[tf.Tensor]:
    """Decode the words of all owners, the inverse of `own_words`.

    Args:
        members: Sequence of `ShardedParameter`.
        words: Tensor of shape `[num_owners * num_words]`, int32.

    Returns:
        List of tensors, the rounded parameters in their own shapes, float32.
    """
    num_owners = len(members[0].ranges)
    row_words = _CODE.num_words(_row_size(members))
    rows = _CODE.decode(tf.reshape(words, [num_owners, row_words]))
    begins = [0] * num_owners
    wholes = []
    for parameter in members:
        parts = []
        for owner, (start, stop) in enumerate(parameter.ranges):
            begin = begins[owner]
            parts.append(rows[owner, begin : begin + stop - start])
            begins[owner] += _padded_size(stop - start)
        wholes.append(tf.reshape(tf.concat(parts, axis=0), parameter.whole_shape))
    return wholes


def rounded(parameter: ShardedParameter, whole: tf.Tensor) -> tf.Tensor:
    """Round a parameter that was gathered as it is to what a quantized gather makes.

    Args:
        parameter: `ShardedParameter`.
        whole: Tensor of its shape.

    Returns:
        Tensor like `whole`.
    """
    flat = tf.reshape(whole, [-1])
    parts = []
    for start, stop in parameter.ranges:
        if start < stop:
            _, found = _CODE.encode(_whole_blocks(flat[start:stop])[tf.newaxis])
            parts.append(found[0, : stop - start])
    return tf.reshape(tf.cast(tf.concat(parts, axis=0), whole.dtype), whole.shape)


def sent_bytes(members: Sequence[ShardedParameter]) -> int:
    """Bytes of what all owners send of some parameters, instead of their own."""
    row_bytes = WORD_BYTES * _CODE.num_words(_row_size(members))
    return row_bytes * len(members[0].ranges)


def _row_size(members: Sequence[ShardedParameter]) -> int:
    """Elements of a row: the most that an owner has, in whole blocks."""
    by_owner = zip(*(parameter.ranges for parameter in members), strict=True)
    return max(
        sum(_padded_size(stop - start) for start, stop in ranges) for ranges in by_owner
    )


def _padded_size(size: int) -> int:
    return size + -size % _CODE.block


def _whole_blocks(part: tf.Tensor) -> tf.Tensor:
    """A part as flat float32, padded with zeros."""
    flat = tf.reshape(tf.cast(part, tf.float32), [-1])
    return tf.pad(flat, [[0, -flat.shape[0] % _CODE.block]])


def _size(part: tf.Variable) -> int:
    return part.shape.num_elements()
