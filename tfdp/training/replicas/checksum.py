"""Checksums of tensors, computed on their device; any changed bit changes them.

The bits are read as integers x_i of at most 32 bits. The checksum is the sum of
w_i x_i modulo a prime that is larger than any x_i; no weight w_i is a multiple of the
prime. A change of one x_i therefore always changes the checksum, and a change of
several almost always. All sums are of integers and below 2**63: nothing is rounded or
wraps, and the order of summation does not matter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# The smallest prime above 2**32: a prime above any word of 32 bits, so that a change of
# one word always changes the checksum.
MODULUS = 2**32 + 15
# The number of products that are summed before the modulo is taken. A product of a
# number of 33 bits and a weight of at most 18 bits has 51 bits, so the sum of 2**12
# products is below 2**63.
_ROW = 2**12
_FACTOR_BITS = 18
# The number of elements that are widened to int64 at a time, which bounds the memory
# of the copy.
_CHUNK = _ROW * 2**10
# The levels of summation: elements of a row, rows of a chunk, chunks of a tensor,
# tensors. The weight of an element is the product of a weight of each level, so that
# elements at different positions have different weights.
_ELEMENTS, _ROWS, _CHUNKS, _TENSORS = range(4)
_NUM_LEVELS = 4


def checksums(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Compute a checksum of each tensor.

    Args:
        values: Sequence of tensors of static shape, numbers or bools.

    Returns:
        Tensor of shape `[len(values)]`, int64, from 0 to below `2**32 + 15`.

    Example:

    >>> same, other = checksums([tf.constant([1.0, 2.0]), tf.constant([2.0, 1.0])])
    >>> bool(same == other)
    False
    """
    factors = [tf.constant(_factors()[level]) for level in range(_TENSORS)]
    sums: list[tf.Tensor] = []
    for value in values:
        # Dependencies serialize the tensors, so that only one is widened at a time.
        with tf.control_dependencies(sums[-1:]):
            sums.append(_tensor_checksum(value, factors))
    return tf.stack(sums) if sums else tf.zeros([0], tf.int64)


def combine_checksums(sums: tf.Tensor) -> tf.Tensor:
    """Combine checksums, in order, into one.

    Args:
        sums: Tensor of shape `[count]`, from `checksums`.

    Returns:
        Scalar tensor, int64.
    """
    factors = tf.constant(_factors()[_TENSORS])
    while sums.shape[0] > 1:
        sums = _sums_of_rows(sums, factors)
    return tf.reduce_sum(sums)


def _tensor_checksum(value: tf.Tensor, factors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Compute the checksum of one tensor.

    Args:
        value: Tensor of static shape.
        factors: Sequence of int64 tensors `[_ROW]`, the weights of elements in a row of
            `_ROW` elements, of rows in a chunk, and of chunks in the tensor. A shorter
            row uses the first weights only.

    Returns:
        Scalar tensor, int64.
    """
    words = _words(value)
    sums: list[tf.Tensor] = []
    for begin in range(0, words.shape[0], _CHUNK):
        with tf.control_dependencies(sums[-1:]):
            chunk = tf.cast(words[begin : begin + _CHUNK], tf.int64)
        rows = _sums_of_rows(chunk, factors[_ELEMENTS])
        sums.append(_sums_of_rows(rows, factors[_ROWS]))
    if not sums:
        return tf.zeros([], tf.int64)
    return tf.reduce_sum(_sums_of_rows(tf.concat(sums, 0), factors[_CHUNKS]))


def _words(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of a tensor as integers of at most 32 bits: `[num_words]`."""
    flat = tf.reshape(value, [-1])
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    kind = {1: tf.uint8, 2: tf.uint16}.get(flat.dtype.size, tf.int32)
    return tf.reshape(tf.bitcast(flat, kind), [-1])


def _sums_of_rows(numbers: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Compute weighted sums, modulo a prime, of rows of `_ROW` numbers.

    The last row may be shorter.

    Args:
        numbers: Int64 tensor `[count]`.
        factors: Int64 tensor `[_ROW]`, the weights.

    Returns:
        Int64 tensor with a sum for each row, `[ceil(count / _ROW)]`.
    """
    count = numbers.shape[0]
    whole = count // _ROW * _ROW
    sums = []
    if whole:
        rows = tf.reshape(numbers[:whole], [-1, _ROW])
        sums.append(tf.reduce_sum(rows * factors, axis=1))
    if count > whole:
        rest = numbers[whole:] * factors[: count - whole]
        sums.append(tf.reduce_sum(rest, keepdims=True))
    return tf.math.floormod(tf.concat(sums, 0), tf.constant(MODULUS, tf.int64))


@functools.cache
def _factors() -> np.ndarray:
    """Return the weights of all levels: `[_NUM_LEVELS, _ROW]`, int64.

    They are distinct primes, so that no two elements have the same product of weights.
    They are shuffled, so that changes of neighboring elements do not cancel out, by the
    order of hashes, which does not depend on the version of NumPy.
    """
    is_prime = np.ones(2**_FACTOR_BITS, bool)
    is_prime[:2] = False
    for number in range(2, 2 ** (_FACTOR_BITS // 2)):
        if is_prime[number]:
            is_prime[number * number :: number] = False
    largest = np.flatnonzero(is_prime)[-_NUM_LEVELS * _ROW :]
    raw = hashlib.shake_256(b"tfdp").digest(8 * len(largest))
    order = np.argsort(np.frombuffer(raw, "<u8"), kind="stable")
    return largest[order].astype(np.int64).reshape(_NUM_LEVELS, _ROW)
