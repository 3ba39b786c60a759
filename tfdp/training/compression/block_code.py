"""Floats as 8 or 4 bits each, with a float32 scale for each block."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

# Of int32, which every transport moves.
WORD_BYTES = 4
# Below it a quotient by the scale may be infinite.
_LEAST_SCALE = 1e-37


@dataclasses.dataclass(frozen=True)
class BlockCode:
    """Code of float32 elements, which travels as int32.

    Args:
        bits: Int, 8 or 4. Defaults to 8.
        block: Int, elements with a common scale, a multiple of 16. Defaults to 256.

    Example:

    >>> code = BlockCode(block=16)
    >>> words, rounded = code.encode(tf.range(16.0)[tf.newaxis])
    >>> words.shape, float(rounded[0, 15])
    (TensorShape([1, 5]), 15.0)
    """

    bits: int = 8
    block: int = 256

    def num_words(self, size: int) -> int:
        """Int, words of a row of whole blocks.

        Args:
            size: Int, its elements.
        """
        return size // self.block * (self._words_per_block + 1)

    def encode(
        self, rows: tf.Tensor, noise: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Round rows to codes, which travel with their scales as int32.

        An element that is not finite makes its block's scale so, and by that the
        whole block wherever it is decoded.

        Args:
            rows: Tensor of shape `[num_rows, row_size]`, float32, whole blocks.
            noise: Tensor like `rows`, of uniform numbers from 0 to 1 by which they are
                rounded up or down; or `None`, to the nearest. Defaults to `None`.

        Returns:
            Tuple of the words, of shape `[num_rows, num_words]`, and what they decode
            to, like `rows`.
        """
        num_rows, row_size = rows.shape
        blocks = tf.reshape(rows, [num_rows, row_size // self.block, self.block])
        largest = tf.reduce_max(tf.abs(blocks), axis=2, keepdims=True)
        # All is rounded alike in a graph and outside of one: there a division by a
        # constant would become a product, and an inverse be approximate.
        scales = largest * (1.0 / self._most)  # [num_rows, num_blocks, 1]
        codes = blocks / tf.where(scales > _LEAST_SCALE, scales, np.inf)
        if noise is None:
            codes = tf.round(codes)
        else:
            codes = tf.floor(codes + tf.reshape(noise, blocks.shape))
            codes = tf.minimum(codes, float(self._most))
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
        """Decode rows of words, the inverse of `encode`."""
        num_rows, num_words = words.shape
        num_blocks = num_words // (self._words_per_block + 1)
        num_codes = num_blocks * self._words_per_block
        packed = tf.bitcast(words[:, :num_codes], tf.uint8)
        codes = self._from_bytes(tf.reshape(packed, [num_rows, -1]))
        blocks = tf.reshape(codes, [num_rows, num_blocks, self.block])
        scales = tf.bitcast(words[:, num_codes:], tf.float32)
        return tf.reshape(blocks * scales[:, :, tf.newaxis], [num_rows, -1])

    @property
    def _most(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    @property
    def _words_per_block(self) -> int:
        """Words of the codes of a block; its scale is one more."""
        return self.block * self.bits // (8 * WORD_BYTES)

    def _to_bytes(self, codes: tf.Tensor) -> tf.Tensor:
        """Pack codes of shape `[num_rows, row_size]` into bytes."""
        if self.bits == 8:
            return tf.cast(codes, tf.int8)
        # The first half of a row in the lower bits, the second in the upper ones.
        low, high = tf.split(codes, 2, axis=1)
        return tf.cast(low + 16.0 * high + 8.0 * 17.0, tf.uint8)

    def _from_bytes(self, packed: tf.Tensor) -> tf.Tensor:
        """Unpack bytes, the inverse of `_to_bytes`, into float32."""
        if self.bits == 8:
            return tf.cast(tf.bitcast(packed, tf.int8), tf.float32)
        low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
        high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
        return tf.cast(tf.concat([low, high], axis=1), tf.float32) - 8.0


def _to_words(data: tf.Tensor) -> tf.Tensor:
    num_rows, num_bytes = data.shape
    shape = [num_rows, num_bytes // WORD_BYTES, WORD_BYTES]
    return tf.bitcast(tf.reshape(data, shape), tf.int32)
