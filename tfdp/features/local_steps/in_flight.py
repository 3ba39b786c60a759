"""Pseudo-gradients between the update that sends them and the one that uses them.

What was sent waits, is summed on a thread beside the steps, or goes into rounds that go
on without workers that are late.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.collectives import LaunchOrder, ProcessGroup, ProcessTransport
from tfdp.communication.collectives.background import Background, new_queue
from tfdp.communication.collectives.process_transport import host_of
from tfdp.communication.transport import RoundFollower, RoundLeader
from tfdp.communication.transport.arithmetic import mean_by_samples
from tfdp.features.local_steps.reducers import new_reducer, sums_by_samples
from tfdp.ground import _compat
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.text import pluralize
from tfdp.training.reduction.gradient_reducer import GradientReducer, ReplicaReducer
from tfdp.training.reduction.reducer import Reducer

# Of rounds, alike on all workers, which make them in one order.
_names = itertools.count()
# A replica sends its samples before its pseudo-gradients.
_SAMPLES = tf.TensorSpec([], tf.float32)
_FLAGS = tf.TensorSpec([2], tf.int32)


class Deferred:
    """Pseudo-gradients wait where they are until all replicas add them up.

    For transports whose collectives belong to one step: nothing is saved, but the
    result is that of a `Background`.

    Args:
        strategy: A tfdp strategy, or that of one device.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
    """

    def __init__(self, strategy: Any, specs: Sequence[tf.TensorSpec]) -> None:
        devices = strategy.extended.group.devices if is_tfdp(strategy) else ["CPU:0"]
        self._devices = [host_of(device) for device in devices]
        with tf.init_scope():
            self._queues = [new_queue(d, [_SAMPLES, *specs]) for d in self._devices]

    def launch(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Keep the samples and the pseudo-gradients of a local replica."""
        with tf.device(self._devices[replica]):
            self._queues[replica].enqueue(
                [tf.constant(0, tf.int64), *map(tf.identity, tensors)]
            )

    def collect(self, replica: int) -> list[tf.Tensor]:
        """Return what a local replica has launched last."""
        with tf.device(self._devices[replica]):
            _, *tensors = self._queues[replica].dequeue()
        return tensors


def has_background(strategy: Any) -> bool:
    """Return whether collectives of a strategy may run beside its steps.

    TensorFlow's own need not, nor may NCCL's, which come in one order on all devices.
    """
    return is_tfdp(strategy) and isinstance(
        strategy.extended.group.transport, ProcessTransport
    )


def background_reducer(strategy: Any, compression: Any) -> Reducer:
    """Make the reducer of exchanges beside the steps, on all workers, outside of one.

    It has a process group of its own, whose collectives wait for none of a step's.

    Args:
        strategy: A tfdp strategy with a `ProcessTransport`.
        compression: As in `CommunicationOptions`.
    """
    like = strategy.extended.group
    group = ProcessGroup(
        LaunchOrder(like.devices, like.launch_order.num_channels),
        like.size,
        like.transport,
        positions=like.local_positions,
        nodes=like.nodes,
        workers=like.workers,
    )
    return new_reducer(strategy, compression, group)


def background_exchange(
    name: str,
    reducer: Reducer,
    variables: Sequence[Any],
    specs: Sequence[tf.TensorSpec],
    *,
    compresses: bool,
) -> Background:
    """Make a thread that sums the pseudo-gradients of a fragment beside the steps.

    Args:
        name: String, of the thread.
        reducer: `Reducer`, see `background_reducer`, which the caller has to keep: what
            carries the bytes of its process group ends with the group.
        variables: Sequence of the trained Keras variables.
        specs: Sequence of `tf.TensorSpec` of their pseudo-gradients.
        compresses: Bool, whether the reducer may round them.
    """
    hosts = [host_of(device) for device in reducer.group.devices]
    given = [_SAMPLES, *specs]
    exchange = tf.function(
        functools.partial(_exchange, reducer, variables, compresses),
        input_signature=[[given] * len(hosts)],
        autograph=False,
    ).get_concrete_function()
    return Background(name, hosts, given, specs, lambda parts: exchange(parts))


def specs_of(variables: Sequence[Any]) -> list[tf.TensorSpec]:
    """Specs of tensors like some Keras variables."""
    return [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in variables]


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


class Outcome(NamedTuple):
    """What a replica gets of a round, see `tfdp.communication.transport.rounds`."""

    is_made: tf.Tensor  # [], bool
    is_behind: tf.Tensor  # [], bool
    samples: tf.Tensor  # [], float32: those that it has sent
    gradients: list[tf.Tensor]
    state: list[tf.Tensor]  # before the round


class RoundExchange:
    """The rounds of a worker, on a thread beside its steps.

    Args:
        strategy: A tfdp strategy.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
        state_specs: Sequence of `tf.TensorSpec` of the outer state.
        least: Int, how many workers make a round.
        patience_seconds: Float, how long a round waits for more.

    Raises:
        ValueError: If nothing carries rounds between these workers, or there are fewer.
    """

    def __init__(
        self,
        strategy: Any,
        specs: Sequence[tf.TensorSpec],
        state_specs: Sequence[tf.TensorSpec],
        least: int,
        patience_seconds: float,
    ) -> None:
        self._num_gradients = len(specs)
        self._end = _end_of(strategy, least, patience_seconds)
        hosts = [host_of(device) for device in strategy.extended.group.devices]
        self._background = Background(
            "tfdp rounds",
            hosts,
            [_SAMPLES, *specs, *state_specs],
            [_FLAGS, _SAMPLES, *specs, *state_specs],
            _function(self._end, len(specs)),
        )

    def launch(
        self,
        replica: int,
        samples: tf.Tensor,
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
    ) -> None:
        """Send what a local replica has learned, in the graph of a step."""
        self._background.launch(replica, [samples, *gradients, *state])

    def collect(self, replica: int) -> Outcome:
        """Return what became of what a local replica has sent last."""
        flags, samples, *rest = self._background.collect(replica)
        gradients, state = rest[: self._num_gradients], rest[self._num_gradients :]
        return Outcome(flags[0] > 0, flags[1] > 0, samples, gradients, state)

    def rest(self) -> None:
        """Make no more rounds until all have met: this worker is at the meeting."""
        self._background.wait()
        self._end.rest()

    def meet(self) -> None:
        """Begin anew after a meeting."""
        self._end.meet()


def _end_of(
    strategy: Any, least: int, patience_seconds: float
) -> RoundLeader | RoundFollower:
    extended = strategy.extended
    transport, worker_group = extended.group.transport, extended.worker_group
    connect = getattr(transport, "connect", None)
    if not isinstance(transport, ProcessTransport) or connect is None:
        raise ValueError(
            '`min_participants` is for several workers that `backend="direct"` '
            f"connects. Received: {pluralize(worker_group.num_workers, 'worker')}, "
            f"with {transport.name!r}"
        )
    if least > worker_group.num_workers:
        raise ValueError(
            "`min_participants` must be at most the number of workers. Received: "
            f"min_participants={least}, "
            f"{pluralize(worker_group.num_workers, 'worker')}"
        )
    lane = f"rounds {next(_names)}"
    if worker_group.rank:
        return RoundFollower(connect(0, lane))
    others = range(1, worker_group.num_workers)
    links = {rank: connect(rank, lane) for rank in others}
    return RoundLeader(links, least, patience_seconds)


def _function(
    end: RoundLeader | RoundFollower, num_gradients: int
) -> Callable[[list[list[tf.Tensor]]], list[list[tf.Tensor]]]:
    """What the thread does with the tensors of the local replicas."""

    def run(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        samples = [float(own[0].numpy()) for own in parts]
        columns = [[t.numpy() for t in own[1 : 1 + num_gradients]] for own in parts]
        gradients = mean_by_samples(list(zip(samples, columns, strict=True)))
        state = parts[0][1 + num_gradients :]
        reply = end.exchange(sum(samples), gradients, [t.numpy() for t in state])
        mean = reply.mean if reply.is_made else gradients
        with tf.device("CPU:0"):
            flags = tf.constant([reply.is_made, reply.is_behind], tf.int32)
            results = [tf.convert_to_tensor(array) for array in mean]
            if reply.is_behind:
                state = [tf.convert_to_tensor(array) for array in reply.state]
        return [[flags, own[0], *results, *state] for own in parts]

    return run
