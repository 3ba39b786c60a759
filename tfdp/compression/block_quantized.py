"""`BlockQuantized`: gradients of 8 or 4 bits, with a scale for each block."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdp.compression.compressor import Compressor, GradientBucket, State
from tfdp.compression.replica_group import ReplicaGroup

_BITS = (8, 4)
# Of int32, which every transport moves.
_WORD_BYTES = 4
_SCALE_BYTES = 4
# Of halves of a block of 4 bits, a whole number of words.
_BLOCK_MULTIPLE = 16
# Below it the inverse of a scale is infinite.
_LEAST_SCALE = 1e-37


@dataclasses.dataclass(frozen=True)
class BlockQuantized(Compressor):
    """Gradients of 8 or 4 bits an element, with a float32 scale for each block.

    Each replica rounds its gradients and sends to every other one the slice that is
    the other's to sum; sums are added in float32, rounded again, and gathered. Both
    errors are fed back: a replica adds to its next gradients what rounding took from
    them, and to the next sum of its slice what rounding took from that.

    Args:
        bits: Int, 8 or 4. Defaults to 8.
        block: Int, elements with a common scale, a multiple of 16. Defaults to 256.
        stochastic: Bool, whether to round up or down at random, so that the result is
            right on average, instead of to the nearest with error feedback. The
            random numbers follow from the step and the position of the replica.
            Defaults to `False`.

    Raises:
        ValueError: If a value is none of these.

    Example:

    >>> bucket = GradientBucket(size=2**20, dtype="float32", num_replicas=4)
    >>> BlockQuantized(bits=4).wire_ratio(bucket)
    0.12890625

    Source: Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209, section 3.3;
    Alistarh et al. 2017, QSGD, https://arxiv.org/abs/1610.02132, for random rounding;
    Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, for error feedback.
    """

    bits: int = 8
    block: int = 256
    stochastic: bool = False

    cuts_buckets = True
    compresses_gathers = True

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in _BITS:
            raise ValueError(f"`bits` must be 8 or 4. Received: bits={self.bits!r}")
        is_int = isinstance(self.block, int) and not isinstance(self.block, bool)
        if not is_int or self.block < 1 or self.block % _BLOCK_MULTIPLE:
            raise ValueError(
                f"`block` must be a multiple of {_BLOCK_MULTIPLE}. "
                f"Received: block={self.block!r}"
            )
        if not isinstance(self.stochastic, bool):
            raise ValueError(
                "`stochastic` must be True or False. "
                f"Received: stochastic={self.stochastic!r}"
            )

    def state(self, bucket: GradientBucket) -> State:
        """Return the errors to feed back, or the number of steps that were made."""
        if self.stochastic:
            return {"steps": np.zeros([], "int64")}
        slice_size = self._slice_size(bucket)
        return {
            "residual": np.zeros([bucket.size], bucket.dtype),
            "sum_residual": np.zeros([slice_size], bucket.dtype),
        }

    def reduce(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """See `Compressor`: an all-to-all, and an all-gather of rounded sums."""
        slice_size = self._slice_size(bucket)
        padded = dataclasses.replace(
            bucket,
            size=group.size * slice_size,
            flat=_padded(bucket.flat, group.size * slice_size),
        )
        state = dict(state)
        if not self.stochastic:
            state["residual"] = _padded(state["residual"], padded.size)
        piece, state = self.reduce_scatter(padded, state, group)
        state = dict(state)
        if not self.stochastic:
            state["residual"] = state["residual"][: bucket.size]
            piece += state["sum_residual"]
        wide = tf.cast(piece, tf.float32)[tf.newaxis]  # [1, slice_size]
        noise = self._noise(state, group.position, 1, wide.shape)
        words, rounded = self._encode(wide, noise)
        if not self.stochastic:
            state["sum_residual"] = piece - tf.cast(rounded[0], piece.dtype)
        total = self._decode(group.all_gather(words))  # [size, slice_size]
        flat = tf.reshape(total, [-1])[: bucket.size]
        return tf.cast(flat, bucket.dtype), state

    def reduce_scatter(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """See `Compressor`: an all-to-all of rounded slices, summed in float32."""
        state = dict(state)
        flat = bucket.flat
        if not self.stochastic:
            flat += state["residual"]
        rows = tf.reshape(flat, [group.size, -1])  # [size, slice_size]
        slice_size = rows.shape[1]
        wide = tf.cast(rows, tf.float32)
        missing = -slice_size % self.block
        if missing:
            wide = tf.pad(wide, [[0, 0], [0, missing]])
        words, rounded = self._encode(
            wide, self._noise(state, group.position, 0, wide.shape)
        )
        if self.stochastic:
            state["steps"] += 1
        else:
            sent = tf.reshape(rounded[:, :slice_size], [-1])
            state["residual"] = flat - tf.cast(sent, flat.dtype)
        received = self._decode(group.all_to_all(words))
        piece = tf.reduce_sum(received, axis=0)[:slice_size]
        return tf.cast(piece, bucket.dtype), state

    def all_gather(self, piece: tf.Tensor, group: ReplicaGroup) -> tf.Tensor:
        """See `Compressor`: sums that were rounded once are rounded to the same."""
        size = piece.shape[0]
        wide = tf.cast(piece, tf.float32)
        padded = _padded(wide, size + -size % self.block)
        words, _ = self._encode(padded[tf.newaxis], None)
        rows = self._decode(group.all_gather(words))[:, :size]
        return tf.cast(tf.reshape(rows, [-1]), piece.dtype)

    def wire_ratio(self, bucket: GradientBucket) -> float:
        """See `Compressor`: padding to whole blocks counts."""
        slice_size = self._slice_size(bucket)
        bits = self.bits * slice_size + 8 * _SCALE_BYTES * (slice_size // self.block)
        return bucket.num_replicas * bits / 8 / bucket.num_bytes

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def _most(self) -> int:
        """The largest code; the smallest is its negative."""
        return 2 ** (self.bits - 1) - 1

    def _slice_size(self, bucket: GradientBucket) -> int:
        """Elements of a slice, whole blocks."""
        elements = -(-bucket.size // bucket.num_replicas)
        return elements + -elements % self.block

    def _noise(
        self, state: State, position: int, phase: int, shape: tf.TensorShape
    ) -> tf.Tensor | None:
        """Uniform numbers from 0 to 1, other ones in each step and on each replica."""
        if not self.stochastic:
            return None
        seed = tf.stack([state["steps"], 2 * position + phase])
        return tf.random.stateless_uniform(shape, seed)

    def _encode(
        self, rows: tf.Tensor, noise: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Round rows to codes, which travel with their scales as int32.

        An element that is not finite makes its block's scale so, and by that the
        whole block wherever it is decoded.

        Args:
            rows: Tensor of shape `[num_rows, row_size]`, float32, whole blocks.
            noise: Tensor like `rows`, or `None` to round to the nearest.

        Returns:
            Tuple of the words, of shape `[num_rows, num_words]`, and what they decode
            to, like `rows`.
        """
        num_rows, row_size = rows.shape
        blocks = tf.reshape(rows, [num_rows, row_size // self.block, self.block])
        largest = tf.reduce_max(tf.abs(blocks), axis=2, keepdims=True)
        scales = largest / self._most  # [num_rows, num_blocks, 1]
        inverse = tf.where(scales > _LEAST_SCALE, 1.0 / scales, 0.0)
        codes = blocks * inverse
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

    def _decode(self, words: tf.Tensor) -> tf.Tensor:
        """Decode rows of words, the inverse of `_encode`."""
        num_rows, num_words = words.shape
        words_per_block = self.block * self.bits // (8 * _WORD_BYTES)
        num_blocks = num_words // (words_per_block + 1)
        num_codes = num_blocks * words_per_block
        packed = tf.bitcast(words[:, :num_codes], tf.uint8)
        codes = self._from_bytes(tf.reshape(packed, [num_rows, -1]))
        blocks = tf.reshape(codes, [num_rows, num_blocks, self.block])
        scales = tf.bitcast(words[:, num_codes:], tf.float32)
        return tf.reshape(blocks * scales[:, :, tf.newaxis], [num_rows, -1])

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
    shape = [num_rows, num_bytes // _WORD_BYTES, _WORD_BYTES]
    return tf.bitcast(tf.reshape(data, shape), tf.int32)


def _padded(flat: tf.Tensor, size: int) -> tf.Tensor:
    missing = size - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat
