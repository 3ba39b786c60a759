"""Pseudo-gradients between the update that sends them and the one that uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdp.communication.collectives import LaunchOrder, ProcessGroup, ProcessTransport
from tfdp.communication.collectives.background import Background, new_queue
from tfdp.communication.collectives.process_transport import host_of
from tfdp.features.local_steps.exchange_reducer import new_reducer, sums_by_samples
from tfdp.ground import _compat
from tfdp.ground.base.context import is_tfdp
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer

# Sums what all replicas have sent: a replica's samples, and its pseudo-gradients.
Sum = Callable[[tf.Tensor, Sequence[tf.Tensor]], Sequence[tf.Tensor]]


class InFlight(Protocol):
    """What the replicas have sent of one fragment, until they use its sum."""

    def launch(
        self, replica: int, samples: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Send what a local replica has learned."""

    def collect(self, replica: int, add_up: Sum) -> Sequence[tf.Tensor]:
        """Return the sum over all replicas of what they have sent last."""


class Deferred:
    """Pseudo-gradients wait where they are until all replicas add them up.

    For transports whose collectives belong to one step: what is saved is nothing, but
    the result is that of a `BackgroundExchange`.

    Args:
        devices: Sequence of strings, the CPU of each local replica.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
    """

    def __init__(self, devices: Sequence[str], specs: Sequence[tf.TensorSpec]) -> None:
        given = [tf.TensorSpec([], tf.float32), *specs]
        with tf.init_scope():
            self._queues = [new_queue(device, given) for device in devices]
        self._devices = devices

    def launch(
        self, replica: int, samples: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> None:
        """See `InFlight`."""
        with tf.device(self._devices[replica]):
            self._queues[replica].enqueue(
                [tf.constant(0, tf.int64), samples, *map(tf.identity, gradients)]
            )

    def collect(self, replica: int, add_up: Sum) -> Sequence[tf.Tensor]:
        """See `InFlight`."""
        with tf.device(self._devices[replica]):
            _, samples, *gradients = self._queues[replica].dequeue()
        return add_up(samples, gradients)


class BackgroundExchange:
    """Pseudo-gradients are added up on a thread, while the replicas go on.

    Args:
        background: `Background`.
        reducer: `Reducer` that it reduces by: what carries the bytes of its process
            group ends with the group.
    """

    def __init__(self, background: Background, reducer: Reducer) -> None:
        self._background = background
        self._reducer = reducer

    def launch(
        self, replica: int, samples: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> None:
        """See `InFlight`."""
        self._background.launch(replica, [samples, *gradients])

    def collect(self, replica: int, add_up: Sum) -> Sequence[tf.Tensor]:
        """See `InFlight`."""
        del add_up
        return self._background.collect(replica)


def has_background(strategy: Any) -> bool:
    """Return whether collectives of a strategy may run beside its steps.

    TensorFlow's own need not, nor may NCCL's, which come in one order on all devices.
    """
    return is_tfdp(strategy) and isinstance(
        strategy.extended.group.transport, ProcessTransport
    )


def deferred(strategy: Any, specs: Sequence[tf.TensorSpec]) -> Deferred:
    """Make the `Deferred` of a strategy, or of one device."""
    devices = strategy.extended.group.devices if is_tfdp(strategy) else ["CPU:0"]
    return Deferred([host_of(device) for device in devices], specs)


def background_exchanges(
    strategy: Any,
    fragments: Sequence[tuple[Sequence[Any], Sequence[tf.TensorSpec]]],
    compression: Any,
) -> list[BackgroundExchange]:
    """Make the exchange of each fragment, on all workers, outside of a step.

    They have a process group of their own, whose collectives wait for none of a step's.

    Args:
        strategy: A tfdp strategy with a `ProcessTransport`.
        fragments: Sequence of pairs of sequences: the trained Keras variables of a
            fragment, and `tf.TensorSpec` of their pseudo-gradients.
        compression: As in `CommunicationOptions`.
    """
    extended = strategy.extended
    like = extended.group
    group = ProcessGroup(
        LaunchOrder(like.devices, like.launch_order.num_channels),
        like.size,
        like.transport,
        positions=like.local_positions,
        nodes=like.nodes,
        workers=like.workers,
    )
    reducer = new_reducer(strategy, compression, group)
    return [
        _background(
            f"exchange {number}", reducer, *fragment, compresses=compression is not None
        )
        for number, fragment in enumerate(fragments)
    ]


def specs_of(variables: Sequence[Any]) -> list[tf.TensorSpec]:
    """Specs of tensors like some Keras variables."""
    return [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in variables]


def _background(
    name: str,
    reducer: Reducer,
    variables: Sequence[Any],
    specs: Sequence[tf.TensorSpec],
    *,
    compresses: bool,
) -> BackgroundExchange:
    hosts = [host_of(device) for device in reducer.group.devices]
    given = [tf.TensorSpec([], tf.float32), *specs]
    exchange = tf.function(
        functools.partial(_exchange, reducer, variables, compresses),
        input_signature=[[given] * len(hosts)],
        autograph=False,
    ).get_concrete_function()

    def run(parts: list[list[tf.Tensor]]) -> Sequence[Sequence[tf.Tensor]]:
        return exchange(parts)

    background = Background(f"tfdp {name}", hosts, given, specs, run)
    return BackgroundExchange(background, reducer)


def _exchange(
    reducer: Reducer,
    variables: Sequence[Any],
    compresses: bool,
    parts: list[list[tf.Tensor]],
) -> list[list[tf.Tensor]]:
    """Sum the parts of all replicas, in the graph of a thread's function."""
    sums = []
    for replica, (samples, *gradients) in enumerate(parts):
        own: GradientReducer = ReplicaReducer(reducer, None, replica)
        device = reducer.group.devices[replica]
        with tf.device(device), _compat.ordered_by_itself():
            sums.append(
                sums_by_samples(
                    own, samples, gradients, variables, compresses=compresses
                )
            )
    return sums
