"""`BlockQuantized`: gradients in 8 or 4 bits, with a scale for each block."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdp.ground.arguments import checked_bool, is_integer, plain
from tfdp.training.compression.block_code import WORD_BYTES, BlockCode
from tfdp.training.compression.compressor import Compressor, GradientBucket, State
from tfdp.training.compression.replica_group import ReplicaGroup

_BITS = (8, 4)
# `block` must be a multiple of this number, so that half a block of 4-bit codes fills
# whole int32 words.
_BLOCK_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class BlockQuantized(Compressor):
    """Gradients in 8 or 4 bits an element, with a float32 scale for each block.

    Each replica sums one slice of a bucket. Replicas round their gradients and exchange
    slices by an all-to-all; the slices are summed in float32, rounded again, and
    gathered by an all-gather. Both rounding errors are fed back: each replica adds the
    error of its gradients to its next gradients, and the error of its sum to the next
    sum of its slice.

    Args:
        bits: Int, 8 or 4. Defaults to 8.
        block: Int, number of elements with a common scale, a multiple of 16. Defaults
            to 256.
        stochastic: Bool. If `True`, values are rounded up or down at random, so that
            the result is unbiased. If `False`, they are rounded to the nearest with
            error feedback. The random numbers depend on the step and on the position of
            the replica only. Defaults to `False`.

    Raises:
        ValueError: If an argument has another value.

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
        if not is_integer(self.bits) or self.bits not in _BITS:
            raise ValueError(f"`bits` must be 8 or 4. Received: bits={self.bits!r}")
        if not is_integer(self.block, least=1) or self.block % _BLOCK_MULTIPLE:
            raise ValueError(
                f"`block` must be a multiple of {_BLOCK_MULTIPLE}. "
                f"Received: block={self.block!r}"
            )
        stochastic = checked_bool("stochastic", self.stochastic)
        object.__setattr__(self, "stochastic", stochastic)
        object.__setattr__(self, "bits", plain(self.bits))
        object.__setattr__(self, "block", plain(self.block))

    def state(self, bucket: GradientBucket) -> State:
        """Return the initial state: zero errors; with `stochastic`, a step counter."""
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
        """Sum a bucket over the replicas, see `Compressor.reduce`.

        Rounded gradients are exchanged by an all-to-all, rounded sums by an all-gather.
        """
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
        wide = tf.cast(piece, tf.float32)[tf.newaxis]
        noise = self._noise(state, group.position, 1, wide.shape)
        words, rounded = self._code.encode(wide, noise)
        if not self.stochastic:
            state["sum_residual"] = piece - tf.cast(rounded[0], piece.dtype)
        # The bucket was cut into slices by position, and `all_gather` joins them in the
        # same order. So the padding of the bucket is at the end, where it is cut off.
        total = self._code.decode(group.all_gather(words))
        flat = tf.reshape(total, [-1])[: bucket.size]
        return tf.cast(flat, bucket.dtype), state

    def reduce_scatter(
        self, bucket: GradientBucket, state: State, group: ReplicaGroup
    ) -> tuple[tf.Tensor, State]:
        """Sum a bucket and keep one slice of it, see `Compressor.reduce_scatter`.

        Rounded slices are exchanged by an all-to-all, and summed in float32.
        """
        state = dict(state)
        flat = bucket.flat
        if not self.stochastic:
            flat += state["residual"]
        # Row i is the slice that the replica at position i sums.
        rows = tf.reshape(flat, [group.size, -1])
        slice_size = rows.shape[1]
        wide = tf.cast(rows, tf.float32)
        missing = -slice_size % self.block
        if missing:
            wide = tf.pad(wide, [[0, 0], [0, missing]])
        words, rounded = self._code.encode(
            wide, self._noise(state, group.position, 0, wide.shape)
        )
        if self.stochastic:
            state["steps"] += 1
        else:
            sent = tf.reshape(rounded[:, :slice_size], [-1])
            state["residual"] = flat - tf.cast(sent, flat.dtype)
        received = self._code.decode(group.all_to_all(words))
        piece = tf.reduce_sum(received, axis=0)[:slice_size]
        return tf.cast(piece, bucket.dtype), state

    def all_gather(self, piece: tf.Tensor, group: ReplicaGroup) -> tf.Tensor:
        """Concatenate slices, see `Compressor.all_gather`.

        They are sent in `bits` bits: rounding them a second time does not change them.
        """
        size = piece.shape[0]
        wide = tf.cast(piece, tf.float32)
        padded = _padded(wide, size + -size % self.block)
        words, _ = self._code.encode(padded[tf.newaxis], None)
        rows = self._code.decode(group.all_gather(words))[:, :size]
        return tf.cast(tf.reshape(rows, [-1]), piece.dtype)

    def wire_ratio(self, bucket: GradientBucket) -> float:
        """Return the encoded bytes of a bucket, relative to those of an all-reduce."""
        slice_size = self._slice_size(bucket)
        sent_bytes = WORD_BYTES * self._code.num_words(slice_size)
        return bucket.num_replicas * sent_bytes / bucket.num_bytes

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def _code(self) -> BlockCode:
        """`BlockCode` with the settings of this compressor."""
        return BlockCode(self.bits, self.block)

    def _slice_size(self, bucket: GradientBucket) -> int:
        """Return the number of elements of a slice, padded to whole blocks."""
        elements = -(-bucket.size // bucket.num_replicas)
        return elements + -elements % self.block

    def _noise(
        self, state: State, position: int, phase: int, shape: tf.TensorShape
    ) -> tf.Tensor | None:
        """Return uniform numbers from 0 to 1 for stochastic rounding.

        They differ between steps, replicas and the two phases of a reduction.

        Args:
            state: Dict with the number of steps so far.
            position: Int, position of the calling replica.
            phase: Int, 0 for the rounding of gradients, 1 for that of their sums.
            shape: `tf.TensorShape` of the values to round.

        Returns:
            Tensor of this shape, or `None` if values are rounded to the nearest.
        """
        if not self.stochastic:
            return None
        seed = tf.stack([state["steps"], 2 * position + phase])
        return tf.random.stateless_uniform(shape, seed)


def _padded(flat: tf.Tensor, size: int) -> tf.Tensor:
    """Append zeros to a flat tensor, up to a number of elements."""
    missing = size - flat.shape[0]
    return tf.pad(flat, [[0, missing]]) if missing else flat
