"""TensorFlow's own collectives: NCCL between GPUs, and a ring over memory and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import calls
from tfdp.communication.collectives.groups import CollectiveCall, ProcessGroup
from tfdp.communication.coordination.flight_steps import (
    TracedCollective,
    traced_collectives,
)
from tfdp.communication.coordination.progress import progress
from tfdp.ground._compat import graphs

# Subdivisions of a ring's chunks. TensorFlow's default, one, costs the least CPU time,
# but leaves the network idle between pieces if no other collective runs at the same
# time: then two are used. Measured in docs/reports/performance.md.
_SUBDIVISIONS, _SUBDIVISIONS_ALONE = 1, 2
# In groups of at least this size, TensorFlow's all-to-all over memory and gRPC mixes up
# messages: it names a message by the digits of both members without a separator, so the
# messages from 1 to 10 and from 11 to 0 have one name (seen with 2.21.0).
_MIXED_UP_MEMBERS = 12
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
        # TensorFlow has a reduce-scatter only over NCCL, and its all-reduce of float16
        # rounds to float16 after each addition.
        self.has_reduce_scatter = name == "nccl"
        self.rounds_sums_once = False

    def open(self, group: ProcessGroup) -> Sequence[int | None]:
        """Connect a new group over NCCL; return the position of each local replica.

        NCCL connects a group in its first collective, while TensorFlow holds a lock of
        the process (`NcclManager::GetCommunicator` of 2.21.0). If two hosts connect two
        groups in different orders, each waits for a member that waits for the lock of
        the other host. So groups are connected one by one, in the order in which all
        workers create them.

        TensorFlow may order the GPUs of a process by their links, and not by their
        numbers: what all members gather shows the order. The position of a replica of
        another group is `None`.

        Args:
            group: `ProcessGroup`.
        """
        own = group.local_positions
        members = [r for r, position in enumerate(own) if position is not None]
        if self.name != "nccl" or group.size == 1 or not members:
            return own

        @tf.function(autograph=False)
        def gather_positions() -> list[tf.Tensor]:
            """All-gather the members' positions on each local member.

            Returns:
                List of int32 tensors of shape `[group.size]`, in TensorFlow's order of
                members.
            """
            gathered = []
            for replica in members:
                with tf.device(group.devices[replica]):
                    position = tf.constant([own[replica]], tf.int32)
                    call = CollectiveCall(group, replica, channel=0)
                    gathered.append(self.run("all_gather", position, call))
            return gathered

        with tf.init_scope():
            order = gather_positions()[0].numpy().tolist()
        return [None if position is None else order.index(position) for position in own]

    def run(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall, source: int = 0
    ) -> tf.Tensor:
        """Run a collective, such as `"all_reduce"`, by an operation of TensorFlow.

        Arguments and result are those of `Transport.run`.

        Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations", for the ring.
        """
        if kind == "all_to_all" and not self._exchanges(call.group):
            rows = self.run("all_gather", tensor[tf.newaxis], call)
            return rows[:, call.group.position(call.replica)]
        sent, back = self._as_supported(kind, tensor, call)
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

    def sums_as_sent(self, group: ProcessGroup) -> bool:
        """Return whether a reduce-scatter adds elements in the dtype that is sent.

        If not, an all-to-all and a local sum replace it with the same bytes.
        """
        return self.has_reduce_scatter and not self._exchanges(group)

    def _exchanges(self, group: ProcessGroup) -> bool:
        """Return whether TensorFlow's all-to-all works between the members of a group.

        The all-to-all over NCCL sends only to members of the same process, without an
        error (`NcclManager::LoopKernelLaunches` of 2.21.0). In groups of at least
        `_MIXED_UP_MEMBERS` replicas the one over gRPC mixes up messages.
        """
        if self.name == "nccl":
            return group.is_local
        return group.size < _MIXED_UP_MEMBERS

    def _as_supported(
        self, kind: str, tensor: tf.Tensor, call: CollectiveCall
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """View or cast a tensor as a dtype that TensorFlow's collectives have.

        Args:
            kind: String, the kind of the collective.
            tensor: Tensor to send.
            call: `CollectiveCall`.

        Returns:
            Tuple of the tensor to send, and a function from the received tensor to one
            of the dtype of `tensor`.
        """
        dtype, is_sum = tensor.dtype, kind in ("all_reduce", "reduce_scatter")
        is_nccl_of_halves = self.name == "nccl" and dtype == tf.bfloat16
        if dtype.is_complex:
            sent = tf.bitcast(tensor, dtype.real_dtype)
            return sent, lambda received: tf.bitcast(received, dtype)
        moves_bits = is_nccl_of_halves or kind in ("all_gather", "broadcast")
        if dtype == tf.bfloat16 and moves_bits and not is_sum:
            # TensorFlow does not gather or broadcast bfloat16, and over NCCL it has no
            # collective of bfloat16 (`kValidDataTypes` of 2.21.0), so the bits are sent
            # as float16.
            sent = tf.bitcast(tensor, tf.float16)
            return sent, lambda received: tf.bitcast(received, dtype)
        wide = dtype
        if is_nccl_of_halves:
            wide = tf.float32
        if dtype == tf.int32 and self.name == "ring" and is_sum:
            # TensorFlow adds int32 tensors on the host, even if they are on a GPU. So
            # those on a GPU are cast to int64 before the sum.
            is_on_gpu = "GPU:" in call.group.devices[call.replica]
            wide = tf.int64 if is_on_gpu else dtype
        return tf.cast(tensor, wide), lambda received: tf.cast(received, dtype)

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
            # TensorFlow remembers the options of an instance key, so collectives with
            # different numbers of subdivisions must have different keys.
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
        # TensorFlow remembers the source of a broadcast's instance key, so broadcasts
        # from different sources must have different keys.
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

        Returns:
            Dict with the size and the key of the group, the instance key, the ordering
            token of the call's channel, and the communication hint.
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
    """Describe a collective between workers for flight records, once per process.

    Args:
        kind: String, the kind of the collective.
        tensor: Tensor that is sent.
        call: `CollectiveCall`.

    Returns:
        List of one `TracedCollective`, whose name is its kind; empty if the caller is
        not the first local replica in the group, or if one worker has all of it.
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


def _check_loop(num_local: int) -> None:
    """Raise `ValueError` for a collective in a loop of one of several local replicas.

    TensorFlow matches collectives also by the name of their loop, which differs between
    the replicas of a process, so the collective would deadlock.

    Args:
        num_local: Int, number of replicas of this process.
    """
    if num_local > 1 and graphs.in_loop_of_replica():
        raise ValueError(
            "An update or an all-reduce inside a loop inside `strategy.run` waits "
            "indefinitely if a process has several replicas. Put the loop around "
            "`strategy.run` instead."
        )
