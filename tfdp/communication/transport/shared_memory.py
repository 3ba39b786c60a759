"""Collectives of the processes of one host through shared memory.

Each member writes into memory of its own, its outbox, which all others have mapped to
be read. An outbox has no name: its file descriptor is sent over the Unix connections
to the other members, so that nobody else can open it, and nothing is left of it when
the processes have ended, however they end. Nor does it need `/dev/shm`. Where a member
gets no memory for it, all members take their sockets instead.

Arrays travel in steps, through the two slots of an outbox in turns:

    step i:  write chunk i into slot i % 2  ->  bell  ->  read chunk i of the others

The bell is a short message to each other member and one from each. A member that has
all bells of a step knows that all others have read what they were given in the step
before the last one, so that its slot is free again. The bell wakes whoever sleeps, and
orders memory on any processor.

An all-reduce of two members copies half of an array into the outbox, adds the other's
half to its own, copies that sum into the outbox, and the other's sum out of it: four
passes over half of the bytes, in chunks that stay in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from tfdp.communication.cluster.limits import lack_of_files
from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.calls import HEADER_BYTES, Call, call_of
from tfdp.communication.transport.communicator import (
    Array,
    Communicator,
    TransportError,
)
from tfdp.communication.transport.mesh import Mesh
from tfdp.communication.transport.schedules import equal_bounds
from tfdp.communication.transport.socket_communicator import SocketCommunicator

_logger = logging.getLogger("tfdp.transport")

# Bytes of the chunks of all members together: they stay in a core's cache, and are
# worth the bell. `python -m tools.bench transport` compares 256 kB to 4 MB, see "The
# transport by itself" in docs/performance.md.
CHUNKS_BYTES = 1 << 21
# Below it the message that rings the bell may as well be the data.
SMALL_BYTES = 1 << 15
# Number of the step, after what is called.
_STEP = struct.Struct("<Q")
# The place of sums in an outbox.
_SUMS = -1
# Tags of the agreements that all members have made their outboxes, and mapped them.
_HAVE_MADE, _HAVE_MAPPED = 1, 2


class SharedMemoryCommunicator(SocketCommunicator):
    """Communicator of workers on one host, see `Communicator`.

    What is small, and all-to-all, goes over the sockets; so does everything where a
    member gets no shared memory, which it logs.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, this worker among them.
        lane: String, what the group is for; all its members give the same one.
        chunks_bytes: Int, bytes that are written for all members in a step. Defaults
            to `CHUNKS_BYTES`.
        small_bytes: Int, largest array that goes over the sockets. Defaults to
            `SMALL_BYTES`.

    Raises:
        PeerLost: If a member ends meanwhile.
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
        self._smallest = small_bytes
        self._outboxes: list[_Outbox] = []
        # A multiple of the size of every dtype.
        self._chunk_bytes = chunks_bytes // self._size // 64 * 64
        self._step = 0
        with self._collective():
            self._outboxes = self._shared_outboxes()
        if self._outboxes:
            self.name = "shared memory"

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """See `Communicator`."""
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
        """See `Communicator`."""
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
        """See `Communicator`."""
        if self._is_for_sockets(array):
            super().all_gather(array, bounds, tag)
            return
        call = call_of("all-gather", array, tag, bounds)
        self._copy(call, _parts(array, bounds))

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """See `Communicator`."""
        if self._is_for_sockets(array):
            super().broadcast(array, source, tag)
            return
        parts = [array if i == source else array[:0] for i in range(self._size)]
        self._copy(call_of(f"broadcast {source}", array, tag), parts)

    def close(self, reason: str = "") -> None:
        """See `Communicator`."""
        super().close(reason)
        self._outboxes = []  # a collective that still runs has its own references

    def _sum(
        self,
        call: Call,
        parts: Sequence[Array],
        targets: Sequence[Array],
        *,
        shares: bool,
    ) -> None:
        """Sum the own part of all members, and share the sums."""
        own, target = parts[self.index], targets[self.index]
        with self._collective():
            outboxes = self._outboxes
            for number in range(self._num_chunks(parts) + shares):
                slot, before = self._step % 2, (self._step + 1) % 2
                for member in self._links:
                    outboxes[self.index].put(
                        slot, member, self._chunk(parts[member], number)
                    )
                self._ring_bell(call)
                total = self._chunk(target, number)
                addends = [box.get(slot, self.index, total) for box in outboxes]
                addends[self.index] = (
                    total if own is target else self._chunk(own, number)
                )
                sum_into(total, addends)
                if not shares:
                    continue
                # In a place of its own, since it is read after the next bell.
                outboxes[self.index].put(slot, _SUMS, total)
                for member in self._links if number else ():
                    # Shared before this bell.
                    chunk = self._chunk(targets[member], number - 1)
                    chunk[:] = outboxes[member].get(before, _SUMS, chunk)

    def _copy(self, call: Call, parts: Sequence[Array]) -> None:
        """Copy the own part to all others, and theirs into their parts."""
        own = parts[self.index]
        with self._collective():
            outboxes = self._outboxes
            for number in range(self._num_chunks(parts)):
                slot = self._step % 2
                outboxes[self.index].put(slot, self.index, self._chunk(own, number))
                self._ring_bell(call)
                for member in self._links:
                    chunk = self._chunk(parts[member], number)
                    chunk[:] = outboxes[member].get(slot, member, chunk)

    def _chunk(self, part: Array, number: int) -> Array:
        """Return a chunk of a part, empty beyond its end."""
        length = self._chunk_bytes // part.itemsize
        return part[number * length : (number + 1) * length]

    def _num_chunks(self, parts: Sequence[Array]) -> int:
        return -(-max(part.nbytes for part in parts) // self._chunk_bytes)

    def _ring_bell(self, call: Call) -> None:
        """Wait until all members have written what belongs to this step."""
        message = call.packed() + _STEP.pack(self._step)
        self._step += 1
        for link in self._links.values():
            link.send(message)
        answer = bytearray(len(message))
        for index, link in self._links.items():
            link.receive_into(answer)
            self._check(memoryview(answer)[:HEADER_BYTES], call, index)

    def _is_for_sockets(self, array: Array) -> bool:
        return array.nbytes <= self._smallest or self._size == 1 or not self._outboxes

    def _shared_outboxes(self) -> list[_Outbox]:
        """Make the own outbox, and map those of the others.

        Returns:
            List of all members' outboxes, empty where a member has no memory for them:
            either all members share memory or none does.
        """
        with contextlib.ExitStack() as stack:
            own = self._made_outbox(stack)
            if own is None:
                return []
            for link in self._links.values():
                link.send_descriptor(own)
            descriptors = {self.index: own}
            for index, link in self._links.items():
                descriptors[index] = link.receive_descriptor()
                stack.callback(os.close, descriptors[index])
            return self._mapped_outboxes(descriptors)

    def _made_outbox(self, stack: contextlib.ExitStack) -> int | None:
        """Make the own outbox, or `None` where not all members can."""
        descriptor = None
        with _logged_lack_of_memory():
            descriptor = _new_memory(_num_bytes(self._size, self._chunk_bytes))
            stack.callback(os.close, descriptor)
        return descriptor if self._all_can(descriptor is not None, _HAVE_MADE) else None

    def _mapped_outboxes(self, descriptors: dict[int, int]) -> list[_Outbox]:
        """Map the outboxes of all members; none, if a member cannot."""
        outboxes = []
        with _logged_lack_of_memory():
            outboxes = [
                self._map(descriptors[index], is_own=index == self.index)
                for index in range(self._size)
            ]
        return outboxes if self._all_can(bool(outboxes), _HAVE_MAPPED) else []

    def _all_can(self, can: bool, tag: int) -> bool:
        """Agree with all other members, over the sockets."""
        num_members = np.array([can], np.int32)
        super().all_reduce(num_members, tag)
        return bool(num_members[0] == self._size)

    def _map(self, descriptor: int, *, is_own: bool) -> _Outbox:
        return _Outbox(descriptor, self._size, self._chunk_bytes, is_own=is_own)


def new_communicator(mesh: Mesh, ranks: Sequence[int], lane: str) -> Communicator:
    """Connect the workers of a group, and log by what.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, this worker among them.
        lane: String, what the group is for; all its members give the same one.

    Returns:
        `Communicator`.
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
    """Memory of one member: in each of two slots, a chunk for each other member.

    The place of the member itself holds what is for all, and the last one its sums.
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
        """Copy values to where a member finds them."""
        self.get(slot, member, values)[:] = values

    def get(self, slot: int, member: int, like: Array) -> Array:
        """Return the first values for a member, as many as another array has."""
        return self._chunks[slot, member, : like.nbytes].view(like.dtype)


def _num_bytes(num_members: int, chunk_bytes: int) -> int:
    return 2 * (num_members + 1) * chunk_bytes


def _new_memory(num_bytes: int) -> int:
    """Return the descriptor of memory that is there: no signal kills who writes it."""
    descriptor = os.memfd_create("tfdp", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _logged_lack_of_memory() -> Iterator[None]:
    """Log what the system says where it gives no memory, and continue.

    Raises:
        TransportError: If it gives no file: connections need files, too.
    """
    try:
        yield
    except OSError as error:
        if (lack := lack_of_files(error)) is not None:
            raise TransportError(lack) from error
        _log_lack_of_memory(error.strerror or str(error))


@functools.cache  # once: each lane of a group asks
def _log_lack_of_memory(reason: str) -> None:
    _logger.warning(
        "This worker gets no shared memory for the other workers of its host (%s): "
        "they exchange their data over sockets instead, which takes more of the "
        "processors' time. Give the job more memory to avoid it.",
        reason,
    )


def _parts(array: Array, bounds: Sequence[int]) -> list[Array]:
    return [array[begin:end] for begin, end in itertools.pairwise(bounds)]
