"""Who takes part in a collective, under which key, and in which order.

TensorFlow matches the members of a collective by a group key, a group size
and an instance key. The keys here are ours alone:

* group keys start far above TensorFlow's own, and every strategy of a process
  draws from one counter, so two strategies never meet;
* instance keys are constants of the traced graph, made from kind, dtype, shape
  and position: the n-th collective of that signature in a function.
  TensorFlow's strategies feed a fresh key at every call instead, which costs a
  placeholder a collective and is never fed when an inner function is called in
  a branch or a loop (the reason why stock `steps_per_execution` crashes).

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
import itertools
import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfdp import _compat

# TensorFlow's group keys start at 1 and grow by one per set of devices.
_FIRST_GROUP_KEY = 1 << 24
_KEYS_PER_STRATEGY = 1 << 10
_strategy_counter = itertools.count()

_SIZE_BITS = 8
_HASH_BITS = 22


def _sizes() -> tuple[int, ...]:
    """1 to 16 and then eight sizes an octave, at most an eighth apart.

    Not 0: TensorFlow takes a collective of nothing for an error.
    """
    sizes = list(range(1, 17))
    while len(sizes) < 1 << _SIZE_BITS and sizes[-1] < 2**31 - 1:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + octave // 8)
    return tuple(size for size in sizes if size < 2**31)


# The lengths that tensors of unknown length are padded to.
SIZES = _sizes()


class LaunchOrder:
    """The order in which collectives start on the devices of this process.

    A channel is a chain: collectives of one channel on one device run one
    after the other, in the order in which they were traced. NCCL needs one
    order for all communicators of a device, hence one channel there, shared by
    all groups; on CPUs several channels let buckets overlap each other.

    Args:
        devices: Sequence of strings, the local devices.
        num_channels: Int, chains per device. Defaults to `1`.

    Raises:
        ValueError: If `num_channels` is less than one.
    """

    def __init__(self, devices: Sequence[str], num_channels: int = 1) -> None:
        if num_channels < 1:
            raise ValueError(
                "`num_channels` must be at least 1. "
                f"Received: num_channels={num_channels}"
            )
        self.devices = tuple(devices)
        self.num_channels = num_channels
        # Automatic control dependencies order the operations that take the
        # same resource, here one small variable per device and channel.
        self._tokens = [
            [_compat.ordering_token(device) for _ in range(num_channels)]
            for device in self.devices
        ]
        self.strategy_index = next(_strategy_counter)
        self._group_counter = itertools.count()

    def token(self, replica: int, channel: int) -> tf.Tensor:
        """The resource that orders `channel` on a local replica's device."""
        return self._tokens[replica][channel % self.num_channels].handle

    def new_group_key(self) -> int:
        """A group key that no other group of this process has."""
        ordinal = next(self._group_counter)
        return _FIRST_GROUP_KEY + self.strategy_index * _KEYS_PER_STRATEGY + ordinal


class ProcessGroup:
    """The replicas that reduce, gather or broadcast together.

    Groups have to be made in the same order on every worker: their keys count.

    Args:
        launch_order: A `LaunchOrder`, shared by all groups of these devices.
        size: Int, the number of replicas in the group, on all workers.
        backend: String, `"ring"` or `"nccl"`. Defaults to `"ring"`.
        timeout_seconds: Float or `None`, after which a collective gives up.
            Defaults to `None`, never.

    Example:

    >>> order = LaunchOrder(["CPU:0", "CPU:1"])
    >>> ProcessGroup(order, size=2).size
    2
    """

    def __init__(
        self,
        launch_order: LaunchOrder,
        size: int,
        backend: str = "ring",
        timeout_seconds: float | None = None,
    ) -> None:
        self.launch_order = launch_order
        self.size = size
        self.backend = backend
        self.timeout_seconds = timeout_seconds or 0.0
        self.key = launch_order.new_group_key()
        self._counters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._signatures: dict[int, tuple] = {}
        self._lock = threading.Lock()

    @property
    def devices(self) -> tuple[str, ...]:
        """The local devices, one for each local replica."""
        return self.launch_order.devices

    def instance_key(
        self, kind: str, tensor: tf.Tensor, replica: int, size: tf.Tensor | None
    ) -> int | tf.Tensor:
        """The key of a local replica's next collective.

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
            number = self._number_of((*signature, ordinal)) << _SIZE_BITS
        return number if size is None else number + size

    def _number_of(self, signature: tuple) -> int:
        digest = hashlib.sha256(repr(signature).encode()).digest()
        number = int.from_bytes(digest[:4], "big") % (1 << _HASH_BITS)
        while self._signatures.setdefault(number, signature) != signature:
            number = (number + 1) % (1 << _HASH_BITS)
        return number
