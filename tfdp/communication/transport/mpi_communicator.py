"""Collectives over MPI, by messages whose waits do not keep a core busy.

Only non-blocking point-to-point messages of MPI are used. MPI's reductions do not
guarantee equal sums on all members and in each run, lack bfloat16, and cannot be
cancelled if a member is lost. Here each member sums its part of an array in the order
of the members; the number of bytes is that of the best algorithms of MPI libraries.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.communication.cluster.launchers import has_mpi4py, mpi_rank
from tfdp.communication.cluster.mpi_cluster import is_started_by_srun
from tfdp.communication.cluster.mpi_job import MpiJob
from tfdp.communication.cluster.mpi_start import current_job, import_mpi, start_job
from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.calls import CollectiveHeader, call_of
from tfdp.communication.transport.communicator import Array, TransportError
from tfdp.communication.transport.mpi_messages import (
    ALL_TO_ALL,
    SMALL_BYTES,
    MpiMessages,
)
from tfdp.communication.transport.schedules import equal_bounds
from tfdp.ground.text import pluralize


def is_mpi_job(num_workers: int | None = None) -> bool:
    """Return whether this process belongs to an MPI job, and mpi4py is installed.

    Args:
        num_workers: Int, required number of processes of the job, or `None` for any.
            Defaults to `None`.

    Returns:
        Bool, from the launcher's variables; MPI is not started. Tasks of `srun` do not
        count unless MPI has started, since many clusters set MPI's variables for each
        of them.
    """
    job = current_job()
    if job is not None:
        return num_workers is None or num_workers == job.size
    own = mpi_rank()
    if own is None or not has_mpi4py() or is_started_by_srun(own):
        return False
    return num_workers is None or num_workers == own.size


def start_and_check_job(
    num_workers: int, rank: int, timeout_seconds: float | None = None
) -> None:
    """Start MPI, and check that the workers are the processes of its job.

    All workers must call this before they create an `MpiCommunicator`.

    Args:
        num_workers: Int, number of workers of the cluster.
        rank: Int, rank of this worker.
        timeout_seconds: Float or `None`, the longest wait for the others. Defaults to
            `None`, no limit.

    Raises:
        ValueError: If there is no MPI job, or its processes are not the workers.
        TimeoutError: If a process of the job does not join in time.
    """
    import_mpi()
    if mpi_rank() is None and current_job() is None:
        raise ValueError(
            '`backend="mpi"` needs processes that MPI has started: mpiexec -n '
            f'{num_workers} python train.py, or srun --mpi=pmix. Use "auto" '
            "elsewhere. Received: no variable of an MPI launcher"
        )
    job = start_job(timeout_seconds)
    if job.size != num_workers:
        raise ValueError(
            "The workers have to be the processes of the MPI job, which has "
            f"{pluralize(job.size, 'process', 'processes')} ({job.library}). Start as "
            "many as TF_CONFIG names, or unset TF_CONFIG. Received: "
            f"{pluralize(num_workers, 'worker')} in the cluster"
        )
    # Slurm and TF_CONFIG may number the processes in another order than MPI, so all
    # processes exchange their ranks.
    ranks = [each["rank"] for each in job.exchange({"rank": rank}, timeout_seconds)]
    if sorted(ranks) != list(range(num_workers)):
        raise ValueError(
            "Two processes of the MPI job are the same worker. Give each its own "
            f"index in TF_CONFIG, or unset it. Received: workers {ranks}, by MPI rank"
        )
    job.world_ranks = tuple(ranks.index(worker) for worker in range(num_workers))


class MpiCommunicator:
    """Collectives of a group of workers over MPI.

    Each lane of a group has its own MPI communicator. Waits use little CPU time: MPI is
    polled after pauses that grow with the wait, up to a millisecond.

    If MPI allows calls from only one thread at a time, all workers must create their
    communicators in the same order.

    Args:
        ranks: Sequence of int, the member workers, including this one. All members
            create the communicator, with the same lane.
        lane: String, name of the communicator in its group.
        timeout_seconds: Float or `None`, the longest wait for the other members.
            Defaults to `None`, no limit.

    Raises:
        TransportError: If there is no MPI job, this worker is not a member, or members
            create different lanes with the same MPI tag.
        TimeoutError: If a member does not join in time.
    """

    name = "mpi"

    def __init__(
        self,
        ranks: Sequence[int],
        lane: str,
        *,
        timeout_seconds: float | None = None,
    ) -> None:
        job = current_job()
        if job is None or job.mpi.Is_finalized():
            raise TransportError(
                "MPI is not running in this process: `start_and_check_job` starts it. "
                f"Received: lane {lane!r}"
            )
        self.ranks = tuple(ranks)
        own = job.world_ranks.index(job.rank)
        if own not in self.ranks:
            raise TransportError(
                f"Worker {own} is not a member of the group. "
                f"Received: ranks={self.ranks}"
            )
        self.index = self.ranks.index(own)
        self._scratch = np.empty(0, np.uint8)
        comm = _create_comm(job, self.ranks, lane, timeout_seconds)
        self._messages = MpiMessages(job, comm, self.ranks)
        self._job = job
        job.add(self)

    def all_reduce(self, array: Array, tag: int, into: Array | None = None) -> None:
        """Sum `array` over all members, in place or into `into`.

        Implements `Communicator.all_reduce`; `tag` identifies the call.
        """
        target = array if into is None else into
        with self._messages.call():
            call = call_of("all-reduce", array, tag)
            if array.nbytes <= SMALL_BYTES:
                self._exchange_and_add(array, target, call)
                return
            bounds = equal_bounds(len(array), len(self.ranks))
            own = target[bounds[self.index] : bounds[self.index + 1]]
            self._reduce_scatter(array, bounds, own, call)
            self._all_gather(target, bounds, call)

    def reduce_scatter(
        self, array: Array, bounds: Sequence[int], tag: int, into: Array | None = None
    ) -> None:
        """Sum this member's part of `array` over all members, in place or into `into`.

        Implements `Communicator.reduce_scatter`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        own = array[bounds[self.index] : bounds[self.index + 1]]
        with self._messages.call():
            call = call_of("reduce-scatter", array, tag, bounds)
            self._reduce_scatter(array, bounds, own if into is None else into, call)

    def all_gather(self, array: Array, bounds: Sequence[int], tag: int) -> None:
        """Receive the parts of the other members into `array`.

        Implements `Communicator.all_gather`. The part of member `i` is from
        `bounds[i]` to `bounds[i + 1]`; `tag` identifies the call.
        """
        with self._messages.call():
            self._all_gather(array, bounds, call_of("all-gather", array, tag, bounds))

    def all_to_all(
        self, sent: Sequence[Array], received: Sequence[Array], tag: int
    ) -> None:
        """Send `sent[i]` to member `i`, and receive from it into `received[i]`.

        Implements `Communicator.all_to_all`; `tag` identifies the call.
        """
        with self._messages.call():
            received[self.index][:] = sent[self.index]
            pairs = {peer: (sent[peer], received[peer]) for peer in self._others()}
            self._messages.exchange(pairs, call_of(ALL_TO_ALL, sent[self.index], tag))

    def broadcast(self, array: Array, source: int, tag: int) -> None:
        """Copy `array` of the member with index `source` to all members.

        Implements `Communicator.broadcast`; `tag` identifies the call.
        """
        size = len(self.ranks)
        with self._messages.call():
            if size == 1:
                return
            call = call_of(f"broadcast {source}", array, tag)
            if array.nbytes <= SMALL_BYTES * size:
                self._broadcast_by_tree(array, source, call)
                return
            # A large array is scattered and then all-gathered: the source sends less
            # than twice the bytes of the array, rather than the whole array to several
            # members.
            bounds = equal_bounds(len(array), size)
            self._scatter(array, bounds, source, call)
            self._all_gather(array, bounds, call)

    def barrier(self, tag: int) -> None:
        """Wait until all members have called this with the same `tag`, an int."""
        size, distance = len(self.ranks), 1
        nothing = np.empty(0, np.uint8)
        with self._messages.call():
            while distance < size:
                peers = {(self.index + distance) % size, (self.index - distance) % size}
                pairs = dict.fromkeys(peers, (nothing, nothing))
                self._messages.exchange(pairs, CollectiveHeader("barrier", tag))
                distance *= 2

    def close(self, reason: str = "") -> None:
        """Close the communicator: a waiting call raises an error at once.

        The other members receive the reason.

        Args:
            reason: String, the cause in the other members' `PeerLost`. Defaults to
                `""`.
        """
        self._messages.close(reason)
        self._job.discard(self)

    # Collectives share phases: an all-reduce and a large broadcast both end with an
    # all-gather. So each phase is a method, which runs within `MpiMessages.call`.

    def _exchange_and_add(
        self, array: Array, target: Array, call: CollectiveHeader
    ) -> None:
        """All-reduce a small array by exchanging it whole between all pairs.

        Args:
            array: Flat array to sum.
            target: Flat array for the sum; it may be `array`.
            call: `CollectiveHeader`, the same on all members.
        """
        parts = self._scratch_parts(array, len(array))
        parts[self.index] = array.copy() if array is target else array
        pairs = {peer: (array, parts[peer]) for peer in self._others()}
        self._messages.exchange(pairs, call)
        sum_into(target, parts)

    def _reduce_scatter(
        self, array: Array, bounds: Sequence[int], target: Array, call: CollectiveHeader
    ) -> None:
        """Sum this member's part over all members into `target`.

        `target` may be that part of `array` itself.

        Args:
            array: Flat array to sum.
            bounds: Sequence of ints, the bounds of the members' parts.
            target: Flat array for the sum of this member's part.
            call: `CollectiveHeader`, the same on all members.
        """
        own = array[bounds[self.index] : bounds[self.index + 1]]
        parts = self._scratch_parts(array, len(own))
        is_in_place = np.may_share_memory(own, target)
        parts[self.index] = target if is_in_place else own
        pairs = {
            peer: (array[bounds[peer] : bounds[peer + 1]], parts[peer])
            for peer in self._others()
        }
        self._messages.exchange(pairs, call)
        sum_into(target, parts)

    def _all_gather(
        self, array: Array, bounds: Sequence[int], call: CollectiveHeader
    ) -> None:
        """Receive the other members' parts into `array`; send them this member's.

        Args:
            array: Flat array, with this member's part.
            bounds: Sequence of ints, the bounds of the members' parts.
            call: `CollectiveHeader`, the same on all members.
        """
        own = array[bounds[self.index] : bounds[self.index + 1]]
        pairs = {
            peer: (own, array[bounds[peer] : bounds[peer + 1]])
            for peer in self._others()
        }
        self._messages.exchange(pairs, call)

    def _scatter(
        self, array: Array, bounds: Sequence[int], source: int, call: CollectiveHeader
    ) -> None:
        """Copy each member's part of the source's array to that member.

        Args:
            array: Flat array, sent by the source; other members receive their part into
                the same place of theirs.
            bounds: Sequence of ints, the bounds of the members' parts.
            source: Int, index of the member that sends.
            call: `CollectiveHeader`, the same on all members.
        """
        nothing = array[:0]
        if self.index == source:
            pairs = {
                peer: (array[bounds[peer] : bounds[peer + 1]], nothing)
                for peer in self._others()
            }
        else:
            own = array[bounds[self.index] : bounds[self.index + 1]]
            pairs = {source: (nothing, own)}
        self._messages.exchange(pairs, call)

    def _broadcast_by_tree(
        self, array: Array, source: int, call: CollectiveHeader
    ) -> None:
        """Broadcast by a binomial tree from the source.

        With members counted from the source, the parent of member r is r without its
        lowest bit.

        Args:
            array: Flat array, sent or received.
            source: Int, index of the member that sends.
            call: `CollectiveHeader`, the same on all members.

        Source: Rajeev Thakur, Rolf Rabenseifner and William Gropp, "Optimization of
        Collective Communication Operations in MPICH", 2005.
        """
        size, nothing = len(self.ranks), array[:0]
        place = (self.index - source) % size
        step = 1
        while step < size and not place & step:
            step *= 2
        if place:
            parent = (place - step + source) % size
            self._messages.exchange({parent: (nothing, array)}, call)
        children = []
        while step > 1:
            step //= 2
            if place + step < size:
                children.append((place + step + source) % size)
        self._messages.exchange(dict.fromkeys(children, (array, nothing)), call)

    def _others(self) -> list[int]:
        """Return the indices of the other members, starting after this member."""
        size = len(self.ranks)
        return [(self.index + step) % size for step in range(1, size)]

    def _scratch_parts(self, like: Array, length: int) -> list[Array]:
        """Return arrays to receive the other members' parts, in memory that is reused.

        New memory would cost time, since the kernel would clear its pages.

        Args:
            like: Array with the dtype of the parts.
            length: Int, number of elements of each part.

        Returns:
            List of arrays by member; that of this member is empty.
        """
        each, size = length * like.itemsize, len(self.ranks)
        if self._scratch.nbytes < each * (size - 1):
            self._scratch = np.empty(each * (size - 1), np.uint8)
        parts = [like[:0]] * size
        for place, peer in enumerate(self._others()):
            part = self._scratch[place * each : (place + 1) * each]
            parts[peer] = part.view(like.dtype)
        return parts


def _create_comm(
    job: MpiJob, ranks: tuple[int, ...], lane: str, timeout_seconds: float | None
) -> Any:
    """Wait for all members of a group; return its new `mpi4py` communicator.

    Args:
        job: `MpiJob`.
        ranks: Tuple of ints, the member workers.
        lane: String, name of the communicator in its group.
        timeout_seconds: Float or `None`, the longest wait for the other members.
    """
    if len(ranks) == 1:
        return job.mpi.COMM_SELF
    members = [job.world_ranks[rank] for rank in ranks]
    text = f"{lane} {ranks}"
    # The tag is computed from the lane and its ranks, so that all members get the same
    # one. It is above the job's tags and below 32767, the largest tag that every MPI
    # library allows.
    tag = 16 + zlib.crc32(text.encode()) % 32000
    names = job.exchange({"lane": text}, timeout_seconds, members, tag)
    others = [each["lane"] for each in names if each["lane"] != text]
    if others:
        raise TransportError(
            "The workers create different communicators at the same time. Received: "
            f"{text!r} and {others[0]!r}"
        )
    # `Create_group` waits for all members while this thread holds the lock. The
    # exchange of lanes has shown that all members have joined, so this wait is short.
    with job.lock:
        return job.comm.Create_group(job.comm.Get_group().Incl(members), tag)
