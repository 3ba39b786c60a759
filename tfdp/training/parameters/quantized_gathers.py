"""Gathers of sharded parameters in 8 bits an element (qwZ).

Each replica encodes its part of a parameter in blocks that hold elements of this part
only. All replicas, the owner included, compute with the decoded values. The part itself
is not rounded, so that rounding errors do not accumulate over updates.

    part of each member, padded to whole blocks -> codes and scales, one row per owner
      -> all-gather -> decode -> whole members from the parts of all owners

Source: Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.param_groups import path_of
from tfdp.ground.plans.units import UnitOptions
from tfdp.training.compression.block_code import WORD_BYTES, BlockCode
from tfdp.training.parameters.sharded_parameter import ShardedParameter

# All compressed gathers use one code, with 8 bits and the default block size, since
# each replica decodes what the others have encoded.
_CODE = BlockCode()


def is_gathered_in_8_bits(parameter: ShardedParameter, options: UnitOptions) -> bool:
    """Return whether gathers send a parameter in 8 bits, which rounds it.

    The option `gather_compression` rounds parameters in float32 or a wider dtype.
    Vectors, such as biases and scales of normalization layers, are not rounded: they
    are small, and layers are sensitive to them. Parameters with fewer elements than a
    block for each owner are not rounded either, since they would be mostly padding.

    Args:
        parameter: `ShardedParameter`.
        options: `UnitOptions` of its unit.
    """
    dtype = parameter.dtype
    is_wide = dtype.is_floating and dtype.size >= tf.float32.size
    is_large = parameter.num_elements >= _CODE.block * len(parameter.ranges)
    is_requested = options.gather_compression is not None
    return is_requested and is_wide and is_large and len(parameter.whole_shape) > 1


def check_constraints(variables: Sequence[Any], options: UnitOptions) -> None:
    """Check that no constraint would write rounded values into a parameter.

    Args:
        variables: Sequence of trained Keras variables.
        options: `UnitOptions`.

    Raises:
        ValueError: If a variable that may be rounded has a constraint.
    """
    for variable in variables if options.gather_compression else ():
        if variable.constraint is not None and len(variable.shape) > 1:
            raise ValueError(
                "A constraint is computed from a whole parameter, which "
                f"`gather_compression={options.gather_compression!r}` rounds, so that "
                "the parameter would keep the rounding error. Remove the constraint, "
                f"or `gather_compression`. Received: {path_of(variable)!r} with "
                f"{variable.constraint}"
            )


def encode_parts(members: Sequence[ShardedParameter], replica: int) -> tf.Tensor:
    """Quantize a replica's parts of some parameters to 8 bits, in int32 words.

    Args:
        members: Sequence of `ShardedParameter`.
        replica: Int, index of the replica among the local ones.

    Returns:
        Int32 tensor of shape `[num_words]`, the same size on all replicas.
    """
    parts = [tf_distribute.local_value(parameter, replica) for parameter in members]
    with_elements = [part for part in parts if part.shape.num_elements()]
    padded = [_whole_blocks(part.read_value()) for part in with_elements]
    missing = _row_size(members) - sum(part.shape[0] for part in padded)
    row = tf.concat([*padded, tf.zeros([missing])], axis=0)
    words, _ = _CODE.encode(row[tf.newaxis])
    return words[0]


def decode_parts(
    members: Sequence[ShardedParameter], words: tf.Tensor
) -> list[tf.Tensor]:
    """Decode the words of all owners, the inverse of `encode_parts`.

    Args:
        members: Sequence of `ShardedParameter`.
        words: Int32 tensor of shape `[num_owners * num_words]`.

    Returns:
        List of float32 tensors, the rounded parameters in their own shapes.
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


def round_parameter(parameter: ShardedParameter, whole: tf.Tensor) -> tf.Tensor:
    """Round a whole parameter to the values of a quantized gather.

    Args:
        parameter: `ShardedParameter`.
        whole: Tensor of the parameter's shape, not rounded yet.

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
    """Return the bytes that all owners together send to gather parameters in 8 bits."""
    row_bytes = WORD_BYTES * _CODE.num_words(_row_size(members))
    return row_bytes * len(members[0].ranges)


def _row_size(members: Sequence[ShardedParameter]) -> int:
    """Return the number of elements that each owner encodes, with padding.

    Each owner's parts of the parameters are padded to whole blocks, and all owners
    encode as many elements as the owner with the most.
    """
    by_owner = zip(*(parameter.ranges for parameter in members), strict=True)
    return max(
        sum(_padded_size(stop - start) for start, stop in ranges) for ranges in by_owner
    )


def _padded_size(size: int) -> int:
    """Round a number of elements up to whole blocks."""
    return size + -size % _CODE.block


def _whole_blocks(part: tf.Tensor) -> tf.Tensor:
    """Return a part as a flat float32 tensor, padded to whole blocks with zeros."""
    flat = tf.reshape(tf.cast(part, tf.float32), [-1])
    return tf.pad(flat, [[0, -flat.shape[0] % _CODE.block]])
