"""Code of floats in 8 or 4 bits an element, with a float32 scale for each block."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

# Bytes of an int32 word: codes are sent as int32, which every transport supports.
WORD_BYTES = 4
# A block with a smaller scale is rounded to zero, since an element divided by such a
# scale may be infinite.
_MIN_SCALE = 1e-37


@dataclasses.dataclass(frozen=True)
class BlockCode:
    """Code of 8 or 4 bits an element, with a scale for each block, in int32 words.

    Args:
        bits: Int, 8 or 4. Defaults to 8.
        block: Int, number of elements with a common scale, a multiple of 16. Defaults
            to 256.

    Example:

    >>> code = BlockCode(block=16)
    >>> words, rounded = code.encode(tf.range(16.0)[tf.newaxis])
    >>> words.shape, float(rounded[0, 15])
    (TensorShape([1, 5]), 15.0)
    """

    bits: int = 8
    block: int = 256

    def num_words(self, size: int) -> int:
        """Return the number of int32 words of an encoded row.

        Args:
            size: Int, number of elements of the row, a multiple of `block`.
        """
        return size // self.block * (self._words_per_block + 1)

    def encode(
        self, rows: tf.Tensor, noise: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Round rows to codes, and pack them with their scales into int32 words.

        An element that is not finite makes the scale of its block, and so the whole
        decoded block, not finite.

        Args:
            rows: Float32 tensor of shape `[num_rows, row_size]`, where `row_size` is a
                multiple of `block`.
            noise: Tensor like `rows` of uniform numbers from 0 to 1, for stochastic
                rounding; or `None`, to round to the nearest. Defaults to `None`.

        Returns:
            Tuple of the words, of shape `[num_rows, num_words]`, and their decoded
            values, like `rows`.
        """
        num_rows, row_size = rows.shape
        blocks = tf.reshape(rows, [num_rows, row_size // self.block, self.block])
        largest = tf.reduce_max(tf.abs(blocks), axis=2, keepdims=True)
        # The product makes eager mode and graphs round alike: in a graph, TensorFlow
        # would replace a division by a constant with a product, and a reciprocal with
        # an approximation.
        scales = largest * (1.0 / self._largest_code)
        codes = blocks / tf.where(scales > _MIN_SCALE, scales, np.inf)
        if noise is None:
            codes = tf.round(codes)
        else:
            codes = tf.floor(codes + tf.reshape(noise, blocks.shape))
            codes = tf.minimum(codes, float(self._largest_code))
        rounded = tf.reshape(codes * scales, rows.shape)
        words = tf.concat(
            [
                _to_words(self._to_bytes(tf.reshape(codes, rows.shape))),
                tf.bitcast(scales[:, :, 0], tf.int32),
            ],
            axis=1,
        )
        return words, rounded

    def decode(self, words: tf.Tensor) -> tf.Tensor:
        """Decode rows of int32 words into float32 values, the inverse of `encode`.

        Args:
            words: Int32 tensor of shape `[num_rows, num_words]`.

        Returns:
            Float32 tensor of shape `[num_rows, row_size]`, the rounded values.
        """
        num_rows, num_words = words.shape
        num_blocks = num_words // (self._words_per_block + 1)
        num_codes = num_blocks * self._words_per_block
        packed = tf.bitcast(words[:, :num_codes], tf.uint8)
        codes = self._from_bytes(tf.reshape(packed, [num_rows, -1]))
        blocks = tf.reshape(codes, [num_rows, num_blocks, self.block])
        scales = tf.bitcast(words[:, num_codes:], tf.float32)
        return tf.reshape(blocks * scales[:, :, tf.newaxis], [num_rows, -1])

    @property
    def _largest_code(self) -> int:
        """Int, the largest code; the smallest code is its negative."""
        return 2 ** (self.bits - 1) - 1

    @property
    def _words_per_block(self) -> int:
        """Int, number of int32 words of a block's codes, without its scale."""
        return self.block * self.bits // (8 * WORD_BYTES)

    def _to_bytes(self, codes: tf.Tensor) -> tf.Tensor:
        """Pack codes into bytes, one code of 8 bits or two codes of 4 bits in each.

        Args:
            codes: Tensor of shape `[num_rows, row_size]`, whole numbers.

        Returns:
            Tensor of shape `[num_rows, num_bytes]`: int8 for 8 bits, uint8 for 4 bits.
        """
        if self.bits == 8:
            return tf.cast(codes, tf.int8)
        # Each byte holds a code of the row's first half in its lower bits and one of
        # the second half in its upper bits. Adding 8 makes both codes positive.
        low, high = tf.split(codes, 2, axis=1)
        return tf.cast(low + 16.0 * high + 8.0 * 17.0, tf.uint8)

    def _from_bytes(self, packed: tf.Tensor) -> tf.Tensor:
        """Convert bytes to float32 codes, the inverse of `_to_bytes`."""
        if self.bits == 8:
            return tf.cast(tf.bitcast(packed, tf.int8), tf.float32)
        low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
        high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
        return tf.cast(tf.concat([low, high], axis=1), tf.float32) - 8.0


def _to_words(data: tf.Tensor) -> tf.Tensor:
    """Reinterpret rows of bytes as rows of int32 words, four bytes in each."""
    num_rows, num_bytes = data.shape
    shape = [num_rows, num_bytes // WORD_BYTES, WORD_BYTES]
    return tf.bitcast(tf.reshape(data, shape), tf.int32)
