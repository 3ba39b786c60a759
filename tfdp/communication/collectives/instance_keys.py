"""Instance keys, which distinguish the collectives of a group.

They are constants of the traced graph, computed from kind, dtype, shape and ordinal:
the n-th collective of that signature in a function. TensorFlow's strategies feed a new
key at every call instead, which costs a placeholder per collective and is not fed if an
inner function is called in a branch or a loop (the reason for crashes of
`steps_per_execution` in stock Keras).

Where all replicas are in one process, the key also has the number of the function,
since threads may run several at once.

A constant key may be reused once the collective has ended on this replica, since
its sends and receives have ended by then. Two collectives with one key never run at
the same time: they are the same operation, and its launch token orders its executions.
TensorFlow remembers the shape of a key until the process ends, so the key depends on
the shape. A length that is known only at run time is rounded up to one of `SIZES`, and
the index of that size is part of the key.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import threading
import weakref
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import graphs

# A key of a static shape has the highest bit set and 30 bits of a hash. With only 22
# bits, two of a few thousand collectives would collide, and workers that trace in
# different orders would not agree on which of the two gets the next number.
_STATIC_BITS = 30
_SIZE_BITS = 8
_DYNAMIC_BITS = 22


def _sizes() -> tuple[int, ...]:
    """Return the lengths that tensors are padded to, in ascending order.

    They are 1 to 16, then 8 up to each power of two: 18, 20, ..., 32, 36, ..., 64, and
    so on below 2**31. 0 is not a size, since TensorFlow rejects an empty collective.
    """
    sizes = list(range(1, 17))
    while len(sizes) < 1 << _SIZE_BITS and sizes[-1] < 2**31 - 1:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + octave // 8)
    return tuple(size for size in sizes if size < 2**31)


# TensorFlow remembers the shape of an instance key, so there is a key for each of these
# lengths, to which a tensor is padded if its length is known only at run time.
SIZES = _sizes()


class InstanceKeys:
    """Source of instance keys, by which workers match the collectives of a group.

    Args:
        is_local: Bool, whether all replicas are in this process. Then each traced
            function has its own keys; workers, which may trace different numbers of
            functions, would not agree on such keys. Defaults to `False`.
    """

    def __init__(self, *, is_local: bool = False) -> None:
        self._is_local = is_local
        # Only graphs that still exist have a number, so the number of a deleted graph
        # is used again.
        self._numbers: weakref.WeakKeyDictionary[Any, int]
        self._numbers = weakref.WeakKeyDictionary()
        self._counters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._signatures: dict[int, dict[int, tuple]] = {}
        self._lock = threading.Lock()

    def next_key(
        self, kind: str, tensor: tf.Tensor, replica: int, size: tf.Tensor | None
    ) -> int | tf.Tensor:
        """Return the instance key of a local replica's next collective.

        The key depends on the position in the graph, so that workers agree even if
        only some of them retrace a function.

        Args:
            kind: String, such as `"reduce"`.
            tensor: Tensor that is sent.
            replica: Int, index among the local replicas.
            size: Scalar int32 tensor, the index of the tensor's length in `SIZES` if it
                is known only at run time, else `None`.

        Returns:
            Int, or a scalar int32 tensor if `size` is given.
        """
        signature: tuple = (kind, tensor.dtype.name, str(tensor.shape))
        with self._lock:
            ordinal = 0
            # Eager collectives of a device never overlap, so they can share one key.
            if not tf.executing_eagerly():
                graph = graphs.root_graph()
                counter = self._counters.setdefault(graph, collections.Counter())
                ordinal = counter[signature, replica]
                counter[signature, replica] += 1
                if self._is_local:
                    signature = (*signature, self._number_of_graph(graph))
            numbered = (*signature, ordinal)
            if size is None:
                return self._number_of(numbered, _STATIC_BITS) | 1 << _STATIC_BITS
            number = self._number_of(numbered, _DYNAMIC_BITS)
        return (number << _SIZE_BITS) + size

    def _number_of_graph(self, graph: Any) -> int:
        """Return the number of a traced function's graph.

        A new graph gets the least number that no other existing graph has.
        """
        if graph not in self._numbers:
            taken = set(self._numbers.values())
            free = (n for n in itertools.count() if n not in taken)
            self._numbers[graph] = next(free)
        return self._numbers[graph]

    def _number_of(self, signature: tuple, bits: int) -> int:
        """Return the number of a signature: its hash, or the next number that is free.

        A signature keeps the number that it gets at the first call.

        Args:
            signature: Tuple of kind, dtype, shape and ordinal of a collective.
            bits: Int, the number is less than `2**bits`.
        """
        digest = hashlib.sha256(repr(signature).encode()).digest()
        number = int.from_bytes(digest[:4], "big") % (1 << bits)
        taken = self._signatures.setdefault(bits, {})
        while taken.setdefault(number, signature) != signature:
            number = (number + 1) % (1 << bits)
        return number
