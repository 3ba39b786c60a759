"""Collectives of the processes of one host through shared memory.

Each member writes into its own memory, its outbox, which all others have mapped for
reading. An outbox has no name and does not use `/dev/shm`: its file descriptor is sent
to the other members over Unix connections, so that no other process can open it, and
the kernel frees it when the processes have ended for any reason. If a member cannot
allocate an outbox, all members use their sockets instead.

Arrays are exchanged in steps, through the two slots of an outbox alternately:

    step i:  write chunk i into slot i % 2  ->  ready message  ->  read others' chunk i

A ready message is sent to each other member, and one received from each. A member that
has received all ready messages of a step knows that all others have read its chunk of
the previous step, so the slot of that chunk is free again. The messages wake sleeping
members, and order memory accesses on any processor.

In an all-reduce of two members, each copies half of the array into its outbox, adds the
other member's half to its own, copies that sum into its outbox, and the other member's
sum out of the other outbox: four passes over half of the bytes, in chunks that stay in
the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.calls import HEADER_BYTES, CollectiveHeader, call_of
from tfdp.communication.transport.communicator import (
    Array,
    Communicator,
    TransportError,
)
from tfdp.communication.transport.mesh import Mesh
from tfdp.communication.transport.schedules import equal_bounds
from tfdp.communication.transport.socket_communicator import SocketCommunicator
from tfdp.ground import user_code

_logger = logging.getLogger("tfdp.transport")

# Total size in bytes of the chunks of all members in a step. Chunks of this size stay
# in a core's cache, and copying them takes long compared to a ready message. `python -m
# tools.bench transport` compares 256 kB to 4 MB, see "The transport by itself" in
# docs/reports/performance.md.
CHUNKS_BYTES = 1 << 21
# Largest array in bytes that is sent over the sockets. Sending it takes hardly longer
# than sending a ready message, which shared memory needs in any case.
SMALL_BYTES = 1 << 15
# A ready message is a header and the number of the step in this format. Only the
# headers are compared, since a connection delivers ready messages in order.
_STEP = struct.Struct("<Q")
# The chunk for sums follows those for the members in an outbox, so this index finds it
# whatever the number of members.
_SUMS = -1
# Tags of two votes: on whether all members have created their outboxes, and on whether
# all have mapped them. One member without memory makes all members use sockets.
_HAVE_CREATED, _HAVE_MAPPED = 1, 2


class SharedMemoryCommunicator(SocketCommunicator):
    """Communicator of workers on one host, through shared memory.

    Small arrays and all-to-alls use the sockets. If a member cannot allocate shared
    memory, which the member logs, all arrays use the sockets.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, including this worker.
        lane: String, purpose of the group, the same on all members.
        chunks_bytes: Int, total bytes of the chunks of all members. An array is
            exchanged in steps of one chunk per member. Defaults to `CHUNKS_BYTES`.
        small_bytes: Int, largest array that goes over the sockets. Defaults to
            `SMALL_BYTES`.

    Raises:
        PeerLost: If a member ends before the group is connected.
        TransportError: If a member does not connect in time, or is on another host.
    """

    def __init__(
        self,
        mesh: Mesh,
        ranks: Sequence[int],
        lane: str,
        *,
        chunks_bytes: int = CHUNKS_BYTES,
        small_bytes: int = SMALL_BYTES,
    ) -> None:
        super().__init__(mesh, ranks, lane)
        self._small_array_bytes = small_bytes
        self._outboxes: list[_Outbox] = []
        # A multiple of 64 bytes is a multiple of the size of every dtype, so a chunk
        # holds whole elements.
        self._chunk_bytes = chunks_bytes // self._size // 64 * 64
        self._step = 0
        with self._collective():
            self._outboxes = self._create_outboxes()
        if self._outboxes:
            self.name = "shared memory"

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """Sum `array` over all members, in place or into `into`.

        Implements `Communicator.all_reduce`; `tag` identifies the call.
        """
        if self._is_for_sockets(array):
            super().all_reduce(array, tag, into)
            return
        bounds = equal_bounds(len(array), self._size)
        parts = _parts(array, bounds)
        targets = parts if into is None else _parts(into, bounds)
        self._sum(call_of("all-reduce", array, tag), parts, targets, shares=True)

    def reduce_scatter(
        self,
        array: Array,
        bounds: Sequence[int],
        tag: int,
        into: Array | None = None,
    ) -> None:
        """Sum this member's part of `array` over all members, in place or into `into`.

        Implements `Communicator.reduce_scatter`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        if self._is_for_sockets(array):
            super().reduce_scatter(array, bounds, tag, into)
            return
        parts = _parts(array, bounds)
        targets = list(parts)
        if into is not None:
            targets[self.index] = into
        call = call_of("reduce-scatter", array, tag, bounds)
        self._sum(call, parts, targets, shares=False)

    def all_gather(self, array: Array, bounds: Sequence[int], tag: int) -> None:
        """Receive the parts of the other members into `array`.

        Implements `Communicator.all_gather`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        if self._is_for_sockets(array):
            super().all_gather(array, bounds, tag)
            return
        call = call_of("all-gather", array, tag, bounds)
        self._copy(call, _parts(array, bounds))

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """Copy `array` of the member with index `source` to all members.

        Implements `Communicator.broadcast`; `tag` identifies the call.
        """
        if self._is_for_sockets(array):
            super().broadcast(array, source, tag)
            return
        parts = [array if i == source else array[:0] for i in range(self._size)]
        self._copy(call_of(f"broadcast {source}", array, tag), parts)

    def close(self, reason: str = "") -> None:
        """Close the connections, as in `Communicator.close`; release shared memory."""
        super().close(reason)
        # A collective that still runs on another thread has its own references to the
        # outboxes, so their memory stays valid for it.
        self._outboxes = []

    def _sum(
        self,
        call: CollectiveHeader,
        parts: Sequence[Array],
        targets: Sequence[Array],
        *,
        shares: bool,
    ) -> None:
        """Sum this member's part over all members; if `shares`, all-gather the sums.

        Args:
            call: `CollectiveHeader`, the same on all members.
            parts: Sequence of arrays, the part of each member, to sum.
            targets: Sequence of arrays for the sums of these parts.
            shares: Bool, whether each member receives the sums of all parts.
        """
        own, target = parts[self.index], targets[self.index]
        with self._collective():
            outboxes = self._outboxes
            for number in range(self._num_chunks(parts) + shares):
                slot, before = self._step % 2, (self._step + 1) % 2
                for member in self._links:
                    outboxes[self.index].put(
                        slot, member, self._chunk(parts[member], number)
                    )
                self._exchange_ready_messages(call)
                total = self._chunk(target, number)
                addends = [box.get(slot, self.index, total) for box in outboxes]
                addends[self.index] = (
                    total if own is target else self._chunk(own, number)
                )
                sum_into(total, addends)
                if not shares:
                    continue
                # Other members may still read these sums while this one writes the
                # chunks of the step after the next to the same slot. So the sums have a
                # separate area of the slot.
                outboxes[self.index].put(slot, _SUMS, total)
                for member in self._links if number else ():
                    # Read the sums of the previous chunk: the member has written them
                    # before it sent the ready message of this step.
                    chunk = self._chunk(targets[member], number - 1)
                    chunk[:] = outboxes[member].get(before, _SUMS, chunk)

    def _copy(self, call: CollectiveHeader, parts: Sequence[Array]) -> None:
        """All-gather: copy this member's part to all others, and receive theirs.

        Args:
            call: `CollectiveHeader`, the same on all members.
            parts: Sequence of arrays, the part of each member.
        """
        own = parts[self.index]
        with self._collective():
            outboxes = self._outboxes
            for number in range(self._num_chunks(parts)):
                slot = self._step % 2
                outboxes[self.index].put(slot, self.index, self._chunk(own, number))
                self._exchange_ready_messages(call)
                for member in self._links:
                    chunk = self._chunk(parts[member], number)
                    chunk[:] = outboxes[member].get(slot, member, chunk)

    def _chunk(self, part: Array, number: int) -> Array:
        """Return the chunk at index `number` of a part, empty beyond the part's end."""
        length = self._chunk_bytes // part.itemsize
        return part[number * length : (number + 1) * length]

    def _num_chunks(self, parts: Sequence[Array]) -> int:
        """Return the number of chunks, and so of steps, that the largest part needs."""
        return -(-max(part.nbytes for part in parts) // self._chunk_bytes)

    def _exchange_ready_messages(self, call: CollectiveHeader) -> None:
        """Exchange messages; return once all members have written their chunks.

        Raises `TransportError` if a member calls another collective.

        Args:
            call: `CollectiveHeader`, which must be the same on all members.
        """
        message = call.packed() + _STEP.pack(self._step)
        self._step += 1
        for link in self._links.values():
            link.send(message)
        answer = bytearray(len(message))
        for index, link in self._links.items():
            link.receive_into(answer)
            self._check(memoryview(answer)[:HEADER_BYTES], call, index)

    def _is_for_sockets(self, array: Array) -> bool:
        """Return whether an array is sent over sockets, not through shared memory.

        Small arrays do; all do if the group has no shared memory, or only one member.
        """
        return (
            array.nbytes <= self._small_array_bytes
            or self._size == 1
            or not self._outboxes
        )

    def _create_outboxes(self) -> list[_Outbox]:
        """Allocate this member's shared memory, its outbox, and map that of all.

        Returns:
            List of all members' outboxes, empty on all members if one of them cannot
            allocate or map memory.
        """
        with contextlib.ExitStack() as stack:
            descriptor = self._create_outbox(stack)
            if descriptor is None:
                return []
            for link in self._links.values():
                link.send_descriptor(descriptor)
            descriptors = {self.index: descriptor}
            for index, link in self._links.items():
                descriptors[index] = link.receive_descriptor()
                stack.callback(os.close, descriptors[index])
            return self._map_outboxes(descriptors)

    def _create_outbox(self, stack: contextlib.ExitStack) -> int | None:
        """Allocate this member's outbox, its shared memory; return its file descriptor.

        Args:
            stack: `contextlib.ExitStack`, which closes the descriptor at its end.

        Returns:
            Int, or `None` if any member cannot create its outbox.
        """
        descriptor = None
        with _logged_lack_of_memory():
            descriptor = _allocate_memory(_num_bytes(self._size, self._chunk_bytes))
            stack.callback(os.close, descriptor)
        return (
            descriptor if self._agree(descriptor is not None, _HAVE_CREATED) else None
        )

    def _map_outboxes(self, descriptors: dict[int, int]) -> list[_Outbox]:
        """Map all members' shared memory; return an empty list if any member cannot.

        Args:
            descriptors: Dict from a member's index to the descriptor of its outbox.
        """
        outboxes = []
        with _logged_lack_of_memory():
            outboxes = [
                _Outbox(
                    descriptors[index],
                    self._size,
                    self._chunk_bytes,
                    is_own=index == self.index,  # members only read others' outboxes
                )
                for index in range(self._size)
            ]
        return outboxes if self._agree(bool(outboxes), _HAVE_MAPPED) else []

    def _agree(self, can_own: bool, tag: int) -> bool:
        """Exchange votes over the sockets; return whether all members vote true.

        Args:
            can_own: Bool, the vote of this member.
            tag: Int, identity of the vote, the same on all members.
        """
        num_members = np.array([can_own], np.int32)
        super().all_reduce(num_members, tag)
        return bool(num_members[0] == self._size)


def new_communicator(mesh: Mesh, ranks: Sequence[int], lane: str) -> Communicator:
    """Create the fastest communicator that a group supports, and log its name.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, including this worker.
        lane: String, purpose of the group, the same on all members.

    Returns:
        `Communicator`, over shared memory if all members are on one host.
    """
    kind: type[SocketCommunicator] = SocketCommunicator
    if mesh.share_host(ranks):
        kind = SharedMemoryCommunicator
    communicator = kind(mesh, ranks, lane)
    _logger.info(
        "Worker %d communicates with workers %s by %s",
        mesh.rank,
        ", ".join(str(rank) for rank in ranks if rank != mesh.rank),
        communicator.name,
    )
    return communicator


class _Outbox:
    """Shared memory that one member writes and all others read, in two slots.

    Steps use the slots alternately. A slot has a chunk for each member, which holds
    data for that member, and one for sums. The chunk of the writing member holds data
    for all.

    Args:
        descriptor: Int, file descriptor of the memory.
        num_members: Int, number of members.
        chunk_bytes: Int, size of a chunk.
        is_own: Bool, whether this member owns the outbox, and may write to it.
    """

    def __init__(
        self, descriptor: int, num_members: int, chunk_bytes: int, *, is_own: bool
    ) -> None:
        num_bytes = _num_bytes(num_members, chunk_bytes)
        found = os.fstat(descriptor).st_size
        if found != num_bytes:
            raise TransportError(
                f"A worker of this host shares {found} bytes where {num_bytes} are "
                "expected: all workers have to run the same version of tfdp."
            )
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_own else 0)
        mapped = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, access)
        memory = np.frombuffer(mapped, np.uint8)
        self._chunks = memory.reshape(2, num_members + 1, chunk_bytes)

    def put(self, slot: int, member: int, values: Array) -> None:
        """Write values into a chunk.

        Args:
            slot: Int, 0 or 1, the slot of the step.
            member: Int, index of the member that the chunk is for; `_SUMS` for sums.
            values: Array, not longer than a chunk.
        """
        self.get(slot, member, values)[:] = values

    def get(self, slot: int, member: int, like: Array) -> Array:
        """Return a view of the chunk for a member, with length and dtype of an array.

        Args:
            slot: Int, 0 or 1, the slot of the step.
            member: Int, index of the member, or `_SUMS` for the chunk of sums.
            like: Array with that length and dtype.
        """
        return self._chunks[slot, member, : like.nbytes].view(like.dtype)


def _num_bytes(num_members: int, chunk_bytes: int) -> int:
    """Return the bytes of an outbox: two slots, each of one more chunk than members.

    Args:
        num_members: Int, number of members of the group.
        chunk_bytes: Int, size of a chunk.
    """
    return 2 * (num_members + 1) * chunk_bytes


def _allocate_memory(num_bytes: int) -> int:
    """Allocate a memfd, so that writes cannot raise SIGBUS; return its descriptor."""
    descriptor = os.memfd_create("tfdp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _logged_lack_of_memory() -> Iterator[None]:
    """Log and suppress an `OSError` of memory allocation in the block.

    Raises:
        TransportError: If the limit of open files is reached, since connections also
            need files.
    """
    try:
        yield
    except OSError as error:
        if (lack := lack_of_files(error)) is not None:
            raise TransportError(lack) from error
        _log_lack_of_memory(error.strerror or str(error))


def _log_lack_of_memory(reason: str) -> None:
    """Log that sockets replace shared memory, once for each reason."""
    # Each lane of a group finds the same lack of memory, which is logged only once.
    if user_code.record_if_new(reason, _log_lack_of_memory):
        _logger.warning(
            "This worker gets no shared memory for the other workers of its host (%s): "
            "they exchange data over sockets instead, which uses more CPU time. Give "
            "the job more memory to avoid this.",
            reason,
        )


def _parts(array: Array, bounds: Sequence[int]) -> list[Array]:
    """Split an array into its parts: part `i` is between bounds `i` and `i + 1`."""
    return [array[begin:end] for begin, end in itertools.pairwise(bounds)]
