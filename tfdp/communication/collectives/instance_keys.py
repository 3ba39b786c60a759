"""Instance keys: tell the collectives of a group apart.

They are constants of the traced graph, made from kind, dtype, shape and position: the
n-th collective of that signature in a function. TensorFlow's strategies feed a fresh
key at every call instead, which costs a placeholder a collective and is never fed when
an inner function is called in a branch or a loop (the reason why stock
`steps_per_execution` crashes).

A constant key may be used again as soon as the collective has ended on this
replica, since by then all its sends and receives have. Two collectives with
one key never run at the same time: they are the same operation, and its launch
token orders its executions. TensorFlow remembers the shape of a key for as
long as the process lives, hence the shape in it; where the length is known
only at run time it is rounded up to one of `SIZES`, and the number of the
size completes the key.
"""

from __future__ import annotations

import collections
import hashlib
import threading
import weakref

import tensorflow as tf

from tfdp.ground import _compat

# A key of a known shape has the highest bit and 30 of a hash. Of some thousand
# collectives two would have the same 22 bits, and workers that trace in different
# orders would not agree on which of the two takes the next number.
_STATIC_BITS = 30
_SIZE_BITS = 8
_DYNAMIC_BITS = 22


def _sizes() -> tuple[int, ...]:
    """Return 1 to 16 and then eight sizes an octave, at most an eighth apart.

    Not 0: TensorFlow takes a collective of nothing for an error.
    """
    sizes = list(range(1, 17))
    while len(sizes) < 1 << _SIZE_BITS and sizes[-1] < 2**31 - 1:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + octave // 8)
    return tuple(size for size in sizes if size < 2**31)


# The lengths that tensors of unknown length are padded to.
SIZES = _sizes()


class InstanceKeys:
    """Instance keys of one group, the same on every worker."""

    def __init__(self) -> None:
        self._counters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._signatures: dict[int, dict[int, tuple]] = {}
        self._lock = threading.Lock()

    def next_key(
        self, kind: str, tensor: tf.Tensor, replica: int, size: tf.Tensor | None
    ) -> int | tf.Tensor:
        """Return the key of a local replica's next collective.

        A function of the position in the graph, so that workers agree even
        when one of them traces again and another does not.

        Args:
            kind: String, such as `"reduce"`.
            tensor: Tensor that is sent.
            replica: Int, index among the local replicas.
            size: Scalar int32 tensor, index into `SIZES` of a length known
                only at run time, or `None`.

        Returns:
            Int, or a scalar int32 tensor where `size` is given.
        """
        signature = (kind, tensor.dtype.name, str(tensor.shape))
        with self._lock:
            ordinal = 0
            # Eager collectives of a device run one after the other.
            if not tf.executing_eagerly():
                graph = _compat.root_graph()
                counter = self._counters.setdefault(graph, collections.Counter())
                ordinal = counter[signature, replica]
                counter[signature, replica] += 1
            named = (*signature, ordinal)
            if size is None:
                return self._number_of(named, _STATIC_BITS) | 1 << _STATIC_BITS
            number = self._number_of(named, _DYNAMIC_BITS)
        return (number << _SIZE_BITS) + size

    def _number_of(self, signature: tuple, bits: int) -> int:
        digest = hashlib.sha256(repr(signature).encode()).digest()
        number = int.from_bytes(digest[:4], "big") % (1 << bits)
        taken = self._signatures.setdefault(bits, {})
        while taken.setdefault(number, signature) != signature:
            number = (number + 1) % (1 << bits)
        return number
