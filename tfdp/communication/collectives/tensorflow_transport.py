"""TensorFlow's own collectives: NCCL between GPUs, and a ring over memory and gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import calls
from tfdp.communication.collectives.groups import CollectiveCall
from tfdp.communication.coordination.flight_steps import (
    TracedCollective,
    traced_collectives,
)
from tfdp.communication.coordination.progress import progress
from tfdp.ground._compat import graphs

# Subdivisions of a ring's chunks. TensorFlow's default, one, costs the least CPU time,
# but leaves the network idle between pieces if no other collective runs at the same
# time. Measured in docs/reports/performance.md.
_SUBDIVISIONS, _SUBDIVISIONS_ALONE = 1, 2
# Number of channels on CPUs, where buckets on different channels overlap. NCCL has one
# channel, since it needs a single order of collectives.
_CPU_CHANNELS = 4
_OPERATIONS = {
    "all_reduce": tf.raw_ops.CollectiveReduceV2,
    "all_gather": tf.raw_ops.CollectiveGatherV2,
    "all_to_all": tf.raw_ops.CollectiveAllToAllV2,
    "reduce_scatter": tf.raw_ops.CollectiveReduceScatterV2,
}


class TensorFlowTransport:
    """Transport by TensorFlow's collective operations; implements `Transport`.

    Args:
        name: String, `"ring"` or `"nccl"`, TensorFlow's communication hint.
    """

    def __init__(self, name: str = "ring") -> None:
        self.name = name
        self.num_channels = 1 if name == "nccl" else _CPU_CHANNELS
        # TensorFlow has no reduce-scatter for CPUs, and its all-reduce of float16
        # rounds to float16 after each addition.
        self.has_reduce_scatter = name == "nccl"
        self.rounds_sums_once = False

    def run(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall, source: int = 0
    ) -> tf.Tensor:
        """Run a collective by an operation of TensorFlow, as in `Transport.run`.

        Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations", for the ring.
        """
        sent, back = _as_real(tensor)
        plan = _plan(kind, sent, call)
        with calls.recorded(plan if tf.executing_eagerly() else []):
            if kind == "broadcast":
                result = self._broadcast(sent, call, source)
            else:
                result = self._collective(kind, sent, call)
        if plan and not tf.executing_eagerly():
            scope, _, _ = result.op.name.rpartition("/")
            named = plan[0]._replace(name=f"{kind} {scope!r}" if scope else kind)
            traced_collectives.add(progress.loop, graphs.root_graph(), named)
        return back(result)

    def _collective(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall
    ) -> tf.Tensor:
        """Run a collective other than a broadcast.

        Args:
            kind: String, `"all_reduce"`, `"all_gather"`, `"all_to_all"` or
                `"reduce_scatter"`.
            tensor: Tensor that is not empty.
            call: `CollectiveCall`, the group, the calling replica and its channel.
        """
        options: dict[str, Any] = {}
        name = kind
        if kind in ("all_reduce", "reduce_scatter"):
            options = {"merge_op": "Add", "final_op": "Id"}
        if kind == "all_reduce":
            subdivisions = _SUBDIVISIONS_ALONE if call.is_alone else _SUBDIVISIONS
            options["max_subdivs_per_device"] = subdivisions
            # TensorFlow remembers the options of an instance key, so each number of
            # subdivisions has its own.
            name = f"{kind} in {subdivisions}"
        arguments = self._arguments(name, tensor, call)
        return _OPERATIONS[kind](input=tensor, **options, **arguments)

    def _broadcast(
        self, tensor: tf.Tensor, call: CollectiveCall, source: int
    ) -> tf.Tensor:
        """Broadcast the tensor of one replica to its group, in launch order.

        Args:
            tensor: Tensor; the others' values are ignored, but not dtype and shape.
            call: `CollectiveCall`, which has the group and the calling replica.
            source: Int, position of the source in the group.

        Returns:
            Tensor of the source, on every replica of the group.
        """
        # TensorFlow remembers the source of a broadcast's instance key, so each source
        # has its own.
        arguments = self._arguments(f"broadcast from {source}", tensor, call)
        token = arguments.pop("ordering_token")[0]

        # Broadcast operations take no ordering token. Assignments to the variable of
        # the token, before and after them, keep the launch order instead.
        before = tf.raw_ops.AssignVariableOp(resource=token, value=0.0)
        with tf.control_dependencies([before] if before is not None else []):
            if call.group.position(call.replica) == source:
                result = tf.raw_ops.CollectiveBcastSendV2(input=tensor, **arguments)
            else:
                result = tf.raw_ops.CollectiveBcastRecvV2(
                    T=tensor.dtype, shape=tf.shape(tensor), **arguments
                )
        with tf.control_dependencies([result]):
            tf.raw_ops.AssignVariableOp(resource=token, value=0.0)
        return result

    def _arguments(self, kind: str, tensor: tf.Tensor, call: CollectiveCall) -> dict:
        """Return the arguments that all collective operations share, by name.

        Args:
            kind: String, which distinguishes the keys of different collectives.
            tensor: Tensor that is sent.
            call: `CollectiveCall`.
        """
        group = call.group
        _check_loop(len(group.devices))
        # `timeout_seconds` is not set: TensorFlow may crash after such a timeout (seen
        # with 2.21.0). `tfdp.communication.coordination.watch` detects lost workers.
        return {
            "group_size": group.size,
            "group_key": group.key,
            "instance_key": call.key(kind, tensor),
            "ordering_token": [group.launch_order.token(call.replica, call.channel)],
            "communication_hint": self.name,
        }


def _plan(kind: str, tensor: tf.Tensor, call: CollectiveCall) -> list[TracedCollective]:
    """Return a collective of workers for flight records, once for all local replicas.

    Args:
        kind: String, the kind of the collective.
        tensor: Tensor that is sent.
        call: `CollectiveCall`.

    Returns:
        List of one `TracedCollective`, whose name is its kind; empty for all but the
        first local replica, and for a group of one worker.
    """
    positions = call.group.local_positions
    num_local = len(positions) - positions.count(None)
    is_first = all(position is None for position in positions[: call.replica])
    if num_local == call.group.size or not is_first:
        return []
    num_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else "[...]"
    form = f"{kind} of {tensor.dtype.name}{sizes}"
    return [TracedCollective(kind, form, num_bytes)]


def _as_real(
    tensor: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """View complex numbers as pairs of real ones; return the inverse function, too.

    TensorFlow has no collectives of complex numbers.

    Returns:
        Tuple of the tensor, real, and a function from a tensor like it to a complex
        one.
    """
    if not tensor.dtype.is_complex:
        return tensor, lambda received: received
    pairs = tf.bitcast(tensor, tensor.dtype.real_dtype)
    return pairs, lambda received: tf.bitcast(received, tensor.dtype)


def _check_loop(num_local: int) -> None:
    """Raise `ValueError` for a collective in a loop of one of several local replicas.

    TensorFlow matches collectives also by the name of their loop, which differs between
    the replicas of a process, so that the collective would deadlock.

    Args:
        num_local: Int, number of replicas of this process.
    """
    if num_local > 1 and graphs.in_loop_of_replica():
        raise ValueError(
            "An update or an all-reduce inside a loop inside `strategy.run` waits "
            "indefinitely if a process has several replicas. Put the loop around "
            "`strategy.run` instead."
        )
