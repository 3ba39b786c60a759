"""Pseudo-gradients in flight, between the update that sends and the one that uses them.

They are stored until all replicas sum them (`Deferred`), summed on a thread during the
steps (`BackgroundThread`), or exchanged in rounds that skip late workers
(`RoundExchange`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.collectives import LaunchOrder, ProcessGroup, ProcessTransport
from tfdp.communication.collectives.background import BackgroundThread, new_queue
from tfdp.communication.collectives.process_transport import host_of
from tfdp.communication.transport import RoundFollower, RoundLeader
from tfdp.communication.transport.arithmetic import mean_by_samples
from tfdp.features.local_steps.reducers import new_reducer, sums_by_samples
from tfdp.ground._compat import graphs
from tfdp.ground.base.context import is_tfdp
from tfdp.ground.text import pluralize
from tfdp.training.reduction.gradient_reducer import ReplicaReducer
from tfdp.training.reduction.reducer import Reducer

# Source of the numbers in the names of connections for rounds: the two ends of a
# connection find each other by its name. The numbers agree on all workers, since these
# create `RoundExchange`s in the same order.
_names = itertools.count()
# A replica sends its number of samples before its pseudo-gradients, since the number is
# their weight in the mean.
_SAMPLES = tf.TensorSpec([], tf.float32)
# The thread of rounds can return tensors only, so it returns `is_made` and `is_behind`
# of a reply as one tensor.
_FLAGS = tf.TensorSpec([2], tf.int32)


class Deferred:
    """Queue of a replica's pseudo-gradients, which are summed when they are used.

    A pseudo-gradient is the change of a weight by the replica's local updates.

    It is for transports whose collectives cannot run concurrently with the steps, and
    saves no time, but has the same result as `BackgroundThread`.

    Args:
        strategy: A tfdp strategy, or Keras's default strategy of one device.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
    """

    def __init__(self, strategy: Any, specs: Sequence[tf.TensorSpec]) -> None:
        devices = strategy.extended.group.devices if is_tfdp(strategy) else ["CPU:0"]
        self._devices = [host_of(device) for device in devices]
        with tf.init_scope():
            self._queues = [new_queue(d, [_SAMPLES, *specs]) for d in self._devices]

    def launch(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Enqueue the pseudo-gradients of a local replica, which `collect` dequeues.

        Args:
            replica: Int, index of the replica among the local ones.
            tensors: Sequence of tensors: the number of the replica's samples, a float32
                scalar, followed by the pseudo-gradients.
        """
        with tf.device(self._devices[replica]):
            self._queues[replica].enqueue(
                [tf.constant(0, tf.int64), *map(tf.identity, tensors)]
            )

    def collect(self, replica: int) -> list[tf.Tensor]:
        """Dequeue what a local replica has launched.

        Args:
            replica: Int, index of the replica among the local ones.

        Returns:
            List of the `tensors` of the oldest `launch`; they are not summed.
        """
        with tf.device(self._devices[replica]):
            _, *tensors = self._queues[replica].dequeue()
        return tensors


def has_background(strategy: Any) -> bool:
    """Return whether collectives of a strategy may run concurrently with its steps.

    Collectives of TensorFlow's runtime and of NCCL may not: their order must be the
    same on all devices.
    """
    return is_tfdp(strategy) and isinstance(
        strategy.extended.group.transport, ProcessTransport
    )


def background_reducer(strategy: Any, compression: Any) -> Reducer:
    """Create the reducer of pseudo-gradients that runs concurrently with the steps.

    Call it on all workers, outside of a step. It has a separate process group, so that
    its collectives do not wait for those of a step.

    Args:
        strategy: A tfdp strategy with a `ProcessTransport`.
        compression: Compression as in `CommunicationOptions`.
    """
    whole = strategy.extended.group
    group = ProcessGroup(
        LaunchOrder(whole.devices, whole.launch_order.num_channels),
        whole.size,
        whole.transport,
        positions=whole.local_positions,
        nodes=whole.nodes,
        workers=whole.workers,
    )
    return new_reducer(strategy, compression, group)


def background_exchange(
    name: str,
    reducer: Reducer,
    compressed: Sequence[Any] | None,
    specs: Sequence[tf.TensorSpec],
) -> BackgroundThread:
    """Create a thread that averages a fragment's pseudo-gradients during the steps.

    Args:
        name: String, name of the thread.
        reducer: `Reducer` from `background_reducer`. Keep a reference to it: the
            connections of its process group are closed with the group.
        compressed: Sequence of the fragment's trained Keras variables if `reducer`
            compresses pseudo-gradients, or `None`.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
    """
    devices = reducer.group.devices
    hosts = [host_of(device) for device in devices]
    input_specs = [_SAMPLES, *specs]

    def exchange(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the means over all replicas, weighted by samples, for each local one.

        Args:
            parts: List of lists of tensors, for each local replica its samples followed
                by its pseudo-gradients.
        """
        means = []
        for replica, (samples, *gradients) in enumerate(parts):
            of_replica = ReplicaReducer(reducer, None, replica)
            with tf.device(devices[replica]), graphs.independent_side_effects():
                means.append(
                    sums_by_samples(of_replica, samples, gradients, compressed)
                )
        return means

    function = tf.function(
        exchange, input_signature=[[input_specs] * len(hosts)], autograph=False
    )
    concrete = function.get_concrete_function()
    return BackgroundThread(
        name, hosts, input_specs, specs, lambda parts: concrete(parts)
    )


def specs_of(variables: Sequence[Any]) -> list[tf.TensorSpec]:
    """Return the `tf.TensorSpec` of each Keras variable."""
    return [tf.TensorSpec(v.shape, tf.as_dtype(v.dtype)) for v in variables]


class RoundResult(NamedTuple):
    """Result, for one replica, of an exchange that does not wait for late workers.

    Args:
        is_made: Scalar bool tensor, whether the exchange, a round, took place.
        is_behind: Scalar bool tensor, whether this worker has missed rounds.
        samples: Scalar float32 tensor, the samples that this replica sent.
        gradients: List of tensors, means over the participants.
        state: List of tensors, the outer optimizer and weights before the round.
    """

    is_made: tf.Tensor
    is_behind: tf.Tensor
    samples: tf.Tensor
    gradients: list[tf.Tensor]
    state: list[tf.Tensor]


class RoundExchange:
    """Exchange in rounds that skip late workers, on a thread during the steps.

    A round averages the pseudo-gradients of the workers that take part: the changes of
    the weights by their local updates.

    Args:
        strategy: A tfdp strategy.
        specs: Sequence of `tf.TensorSpec` of the pseudo-gradients.
        state_specs: Sequence of `tf.TensorSpec` of the outer optimizer and weights.
        least: Int, the number of workers that a round needs.
        patience_seconds: Float, how long a round waits for more workers.

    Raises:
        ValueError: If the transport does not support rounds, or if there are fewer than
            `least` workers.
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
        self._endpoint = _round_endpoint(strategy, least, patience_seconds)
        hosts = [host_of(device) for device in strategy.extended.group.devices]
        self._background = BackgroundThread(
            "tfdp rounds",
            hosts,
            [_SAMPLES, *specs, *state_specs],
            [_FLAGS, _SAMPLES, *specs, *state_specs],
            _round_function(self._endpoint, len(specs)),
        )

    def launch(
        self,
        replica: int,
        samples: tf.Tensor,
        gradients: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
    ) -> None:
        """Send pseudo-gradients of a local replica, in the graph of a step.

        Args:
            replica: Int, index of the replica among the local ones.
            samples: Scalar float32 tensor, the weight of the replica.
            gradients: Sequence of tensors, its pseudo-gradients.
            state: Sequence of tensors, the outer optimizer and weights.
        """
        self._background.launch(replica, [samples, *gradients, *state])

    def collect(self, replica: int) -> RoundResult:
        """Wait for the last round that a local replica launched; return its result."""
        flags, samples, *rest = self._background.collect(replica)
        gradients, state = rest[: self._num_gradients], rest[self._num_gradients :]
        return RoundResult(flags[0] > 0, flags[1] > 0, samples, gradients, state)

    def pause(self) -> None:
        """Wait for the running round, and run no more rounds until `resume`."""
        self._background.wait()
        self._endpoint.pause()

    def resume(self) -> None:
        """Run rounds again after `pause`, once all workers have synchronized."""
        self._endpoint.resume()


def _round_endpoint(
    strategy: Any, least: int, patience_seconds: float
) -> RoundLeader | RoundFollower:
    """Connect the workers for exchanges in rounds: a leader on worker 0, or followers.

    The arguments are those of `RoundExchange`. Returns the endpoint of this worker.

    Raises:
        ValueError: If the transport does not support rounds, or if there are fewer than
            `least` workers.
    """
    extended = strategy.extended
    transport, worker_group = extended.group.transport, extended.worker_group
    connect = getattr(transport, "connect", None)
    if not isinstance(transport, ProcessTransport) or connect is None:
        raise ValueError(
            '`min_participants` needs several workers that `backend="direct"` '
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
    links = {rank: connect(rank, lane) for rank in range(1, worker_group.num_workers)}
    return RoundLeader(links, least, patience_seconds)


def _round_function(
    endpoint: RoundLeader | RoundFollower, num_gradients: int
) -> Callable[[list[list[tf.Tensor]]], list[list[tf.Tensor]]]:
    """Return the function that `RoundExchange` calls on its thread for each round.

    Args:
        endpoint: `RoundLeader` or `RoundFollower` of this worker.
        num_gradients: Int, number of pseudo-gradients, which precede the outer state.
    """

    def run(parts: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Take part in one round with the tensors of the local replicas.

        Args:
            parts: List of lists of tensors, for each local replica its samples, its
                pseudo-gradients and the outer state.

        Returns:
            List of lists of tensors, for each local replica the reply's `is_made` and
            `is_behind` as int32 `[2]`, its samples, the mean pseudo-gradients and the
            outer state before the round.
        """
        samples = [float(part[0].numpy()) for part in parts]
        columns = [[t.numpy() for t in part[1 : 1 + num_gradients]] for part in parts]
        gradients = mean_by_samples(list(zip(samples, columns, strict=True)))
        state = parts[0][1 + num_gradients :]
        reply = endpoint.exchange(sum(samples), gradients, [t.numpy() for t in state])
        mean = reply.mean if reply.is_made else gradients
        with tf.device("CPU:0"):
            flags = tf.constant([reply.is_made, reply.is_behind], tf.int32)
            results = [tf.convert_to_tensor(array) for array in mean]
            if reply.is_behind:
                state = [tf.convert_to_tensor(array) for array in reply.state]
        return [[flags, part[0], *results, *state] for part in parts]

    return run
