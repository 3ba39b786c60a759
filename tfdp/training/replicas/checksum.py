"""Checksums of tensors, computed on their device; any changed bit changes them.

The bits are taken as integers x_i of 32 bits at most, and the checksum is the sum of
w_i x_i modulo a prime that is larger than any of them, with weights w_i that are no
multiples of it. So another value of one x_i is always another checksum, and of several
almost always. All sums are of integers and below 2**63: nothing is rounded, nothing
wraps, and the order of adding does not matter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# The smallest prime above 2**32.
MODULUS = 2**32 + 15
# 2**12 products of 33 and 18 bits are below 2**63.
_ROW = 2**12
_FACTOR_BITS = 18
# Elements that are widened to int64 at once, which bounds the memory that it takes.
_CHUNK = _ROW * 2**10
# Elements of a row, rows of a chunk, chunks of a tensor, tensors: each with weights of
# its own, whose products are the weights of the elements.
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
    found: list[tf.Tensor] = []
    for value in values:
        # One after the other, so that not all are widened at the same time.
        with tf.control_dependencies(found[-1:]):
            found.append(_of_tensor(value, factors))
    return tf.stack(found) if found else tf.zeros([0], tf.int64)


def combined(sums: tf.Tensor) -> tf.Tensor:
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


def _of_tensor(value: tf.Tensor, factors: Sequence[tf.Tensor]) -> tf.Tensor:
    words = _words(value)  # [num_words]
    found: list[tf.Tensor] = []
    for begin in range(0, words.shape[0], _CHUNK):
        with tf.control_dependencies(found[-1:]):
            chunk = tf.cast(words[begin : begin + _CHUNK], tf.int64)
        rows = _sums_of_rows(chunk, factors[_ELEMENTS])
        found.append(_sums_of_rows(rows, factors[_ROWS]))  # [1]
    if not found:
        return tf.zeros([], tf.int64)
    return tf.reduce_sum(_sums_of_rows(tf.concat(found, 0), factors[_CHUNKS]))


def _words(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of a tensor as integers of at most 32 bits: `[num_words]`."""
    flat = tf.reshape(value, [-1])
    if flat.dtype == tf.bool:
        return tf.cast(flat, tf.uint8)
    kind = {1: tf.uint8, 2: tf.uint16}.get(flat.dtype.size, tf.int32)
    return tf.reshape(tf.bitcast(flat, kind), [-1])


def _sums_of_rows(numbers: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Compute weighted sums of `_ROW` numbers each, and of the rest, modulo a prime."""
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

    They are different primes, so that no two elements have the same product of them,
    and in no order: changes of neighbours do not cancel out. The order is that of a
    hash, alike with every version of NumPy.
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
