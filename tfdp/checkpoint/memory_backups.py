"""Backups in the memory of hosts: each worker's part here, its copy on another host.

    step -> copy of the own part in a slot of this host -> header
         -> on a thread: send the part to its keeper, receive the parts kept here

A save is valid once all its parts have headers. Each part has two slots: a save writes
one slot, while the previous save stays valid in the other. A run that starts again
reads the newest save whose parts are all on some host, instead of a backup on the disk.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tfdp.checkpoint import files
from tfdp.checkpoint.background import lack_of_memory, lower_priority
from tfdp.checkpoint.backups import OWNER_FILE, agree_on_backup
from tfdp.checkpoint.copies import copy_to_host
from tfdp.checkpoint.host_memory import HostMemory, host_memory_budget
from tfdp.checkpoint.index import Extent, Index
from tfdp.checkpoint.index_file import versions
from tfdp.checkpoint.memory_parts import (
    CompleteSave,
    PartHeader,
    PartName,
    index_of_parts,
    keepers_of_copies,
    newest_complete_save,
)
from tfdp.checkpoint.memory_reader import PartRange, PartsReader
from tfdp.checkpoint.object_store import open_storage
from tfdp.checkpoint.on_all_workers import run_on_all_workers, storage_timeout
from tfdp.checkpoint.reader import LoadPlan
from tfdp.communication.cluster import cpu_kernels
from tfdp.communication.coordination.checks import check_same_variables
from tfdp.communication.transport import Communicator, new_tag
from tfdp.ground import user_code
from tfdp.ground.base.threads import run_on_thread
from tfdp.ground.text import list_ranks
from tfdp.training.sharding.state_tensors import StateTensor

# `OWNER_FILE` holds an identity of 32 characters. A file of more bytes than this was
# not written by tfdp, and raises an error.
_OWNER_BYTES = 100


class MemoryBackups:
    """Saves of one run in the memory of hosts. All workers call each method together.

    Each worker's part of a state stays on its own host, and a copy on that of its
    keeper, a worker on the next host.

    Args:
        directory: String, path or URL of the backups of the run.
        every: Int, number of batches between two saves within an epoch.
        worker_group: `WorkerGroup` between the workers.
        connect: Callable, from a name to a `Communicator` of all workers; or `None` for
            a single process.
        reads_when_disabled: Bool, whether `find_newest` reads a state even if this run
            cannot save any. Defaults to `False`.

    Attributes:
        is_enabled: Bool, whether states are saved in memory; false after a fault.
    """

    def __init__(
        self,
        directory: str,
        every: int,
        worker_group: Any,
        connect: Callable[[str], Communicator] | None,
        *,
        reads_when_disabled: bool = False,
    ) -> None:
        self._directory = directory
        self._reads_when_disabled = reads_when_disabled
        self._every, self._saved_step = every, 0
        self._group = worker_group
        self._connect = connect
        self._memory = HostMemory(directory)
        self._communicator: Communicator | None = None
        self.is_enabled = True
        self._slot, self._num_saves = 0, 0
        # Sizes of all workers' parts at the last check of the hosts' free memory, which
        # is repeated only if a size changes.
        self._sizes: list[int] = []
        self._pending: Future[None] | None = None
        # An error of this worker is kept until the next save, which sends it to all
        # workers, so that all of them stop saving in memory together.
        self._fault = ""
        self._complete_save: CompleteSave | None = None
        self._headers: Sequence[PartHeader] = []

    def prepare(self) -> None:
        """Open the hosts' memory, choose who keeps which copies, and connect workers.

        The copy of a worker's part of the state is kept by a worker on the next host.
        If a worker fails, nothing is raised, but `is_enabled` becomes false.
        """
        self._owner, token = self._agree_on_names()
        self._token = f"{token}-{self._group.num_workers}"
        key, fault = "", ""
        try:
            key = self._memory.open()
            self._memory.take_lock(self._group.rank)
        except OSError as error:
            fault = str(error)
        answers = self._group.all_gather("memory of hosts", [key, fault])
        self._host_keys = [answer[0] for answer in answers]
        self._keepers = keepers_of_copies(self._host_keys)
        # A fault disables the saves in memory instead of raising an error, since the
        # run can still save in the directory and read a state of an earlier run in
        # memory.
        self._disable_on_fault([answer[1] for answer in answers])
        if not self._keepers:
            return
        assert self._connect is not None
        try:
            self._communicator = self._connect(f"memory {self._group.new_prefix()}")
        except (ValueError, RuntimeError) as error:
            fault = str(error)
        self._disable_on_fault(self._group.all_gather("connections of hosts", fault))

    def find_newest(
        self, make_plan: Callable[[Index], LoadPlan], at_least: tuple[int, bool]
    ) -> tuple[Index, LoadPlan] | None:
        """Find the newest state in memory; drop all others from the memory.

        Args:
            make_plan: Callable, as in `Backups.find_newest`.
            at_least: Tuple about the newest backup in the directory: int, its number of
                batches; and bool, whether it was saved at the end of an epoch. Of two
                saves after the same batch, that at the end of an epoch is newer.

        Returns:
            Tuple of the state's `Index` and `LoadPlan`; or `None` if there is none, or
            the backup is newer.

        Raises:
            ValueError: On every worker, if the run cannot resume from the state.
        """
        if not (self.is_enabled or self._reads_when_disabled):
            return None
        own = self._memory.headers(self._owner)
        answers = self._group.all_gather("states in memory", list(own))
        found = [[PartName(*name) for name in answer] for answer in answers]
        complete = newest_complete_save(self._host_keys, found)
        newest = None
        is_near = complete is not None and complete.is_everywhere(
            self._group.num_workers
        )
        if complete is not None and not self.is_enabled and not is_near:
            # The state is not used: a host lacks parts of it, and the workers have no
            # connection to exchange them.
            complete = None
        if complete is not None and complete.name.order >= at_least:
            headers = self._gather_headers(complete, own)
            path = f"{self._directory} (in memory)"
            find = functools.partial(self._find, headers, complete.name.step, make_plan)
            newest, fault = agree_on_backup(self._group, path, find)
            if newest is None and self._group.is_chief:
                user_code.warn(f"The state in memory is not used: {fault}.")
        self._complete_save = complete if newest else None
        self._slot = 1 - self._complete_save.name.slot if self._complete_save else 0
        self._saved_step = self._complete_save.name.step if self._complete_save else 0
        token = self._complete_save.name.token if self._complete_save else None
        if self.is_enabled:
            self._memory.remove_others(token, self._kept_on_host())
        return newest

    def load(self, index: Index, load_plan: LoadPlan) -> None:
        """Read the state that `find_newest` has found into this worker's variables.

        Args:
            index: `Index` of the state, as `find_newest` returned it.
            load_plan: `LoadPlan` of the variables, as `find_newest` returned it.

        Raises:
            ValueError: On every worker, if a part is wrong on one of them.
            OSError: On every worker, if one of them cannot read a part.
        """
        assert self._complete_save is not None
        act = functools.partial(
            run_on_all_workers,
            self._group,
            self._directory,
            "restored from memory",
            "Some variables may have been overwritten; restart the script.",
        )
        reader = PartsReader(
            self._complete_save, self._headers, index, self._group.rank
        )

        def plan() -> list[list[PartRange]]:
            """Map this host's parts by `mmap`; return the ranges that this host lacks.

            Returns:
                List of lists of `PartRange`, one for each batch of variables that is
                read.
            """
            reader.map_parts(self._memory)
            return reader.requests(load_plan.tensors)

        requests = act("its parts", plan)
        if not self._complete_save.is_everywhere(self._group.num_workers):
            assert self._communicator is not None
            reader.exchange_requests(self._communicator, requests)
        act("its tensors", lambda: reader.read(load_plan))
        self._headers = []
        load_plan.finish()

    @property
    def source(self) -> str:
        """String for messages, the source of the state that `find_newest` has found.

        It is `"memory"`, and lists the workers whose parts only other hosts have.
        """
        assert self._complete_save is not None
        lost = [
            rank
            for rank, holders in enumerate(self._complete_save.holders)
            if rank < self._group.num_workers and rank not in holders
        ]
        if not lost:
            return "memory"
        parts = f"the parts of {list_ranks(lost)}"
        return f"memory, with the copies on other hosts of {parts}"

    def is_due(self, step: int) -> bool:
        """Return whether a save within an epoch is due.

        Args:
            step: Int, number of batches so far.
        """
        return self.is_enabled and step // self._every > self._saved_step // self._every

    def save(
        self, step: int, state: Sequence[StateTensor], run: dict[str, Any]
    ) -> None:
        """Copy this worker's part of a state into memory, and begin to send the copy.

        A thread sends it to the keeper of the part. Only called while `is_enabled` is
        true. If the previous save failed on a worker, or a host lacks memory, nothing
        is saved, and `is_enabled` is false from then on.

        Args:
            step: Int, number of batches so far.
            state: Sequence of `StateTensor`.
            run: Dict, the metadata of the run.
        """
        self._saved_step = step
        entries = files.metadata_of(state)
        self._num_saves += 1
        extents = tuple(
            Extent(number, shard.start, shard.stop)
            for number, tensor in enumerate(state)
            for shard in tensor.owned_shards
            if shard.start < shard.stop
        )
        group = self._group
        name = PartName(
            f"{self._token}-{self._num_saves}",
            step,
            bool(run["batches"]),
            self._slot,
            group.num_workers,
            group.rank,
        )
        made_by = versions() | cpu_kernels.versions()
        run_of_part = run if group.is_chief else None
        header = PartHeader(name, self._owner, entries, extents, made_by, run_of_part)
        text = header.to_text().encode() if self._keepers else b""
        self.finish()
        own = [header.num_bytes, len(text), self._fault]
        # A slow link may delay `finish` on some workers until their previous copy is
        # sent, so the exchange has the long timeout of storage operations.
        timeout = storage_timeout(group)
        answers = check_same_variables(
            group, "a state in memory", entries, "saves", own, timeout
        )
        sizes, lengths, faults = zip(*answers, strict=True)
        if self._disable_on_fault(faults) or not self._fits_or_disable(list(sizes)):
            return
        data = self._copy(header, state)
        if self._keepers is not None:
            # The keeper waits for this part even if the copy has failed. In this case
            # it receives blanks instead of a header, and drops the part.
            if data is None:
                text, data = b" " * len(text), np.empty(header.num_bytes, np.uint8)
            self._pending = run_on_thread(
                "tfdp-memory",
                self._send_copies,
                (np.frombuffer(text, np.uint8), data),
                (lengths, sizes),
                self._slot,
            )
        self._slot = 1 - self._slot

    def finish(self) -> None:
        """Wait until the last save's copies are sent; the next save reports errors."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if error is not None:
            self._fault = files.error_text(error)  # type: ignore[arg-type]

    def close(self) -> None:
        """Wait until the last save's copies are sent, and close the connections.

        The states stay in the memory of the hosts.
        """
        self.finish()
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._memory.close()

    def delete(self) -> None:
        """Free the memory of all states, and disable further saves in memory.

        It is called when training is over, or when a newer backup exists.
        """
        self.finish()
        self._group.all_gather("the end of the states in memory")
        self.is_enabled = False
        self._memory.remove()
        if self._group.is_chief:
            # `OWNER_FILE` has no effect without states in memory, so a failure to
            # remove it is ignored.
            with contextlib.suppress(OSError):
                open_storage(self._directory).remove_file(OWNER_FILE)

    def _agree_on_names(self) -> list[str]:
        """Agree on the identity of the backups' directory and on a name of this `fit`.

        Returns:
            List of two strings: the content of `OWNER_FILE`, and a random name.
        """

        def names() -> list[str]:
            """On worker 0, return the identity of the directory and a random name.

            The identity is read from `OWNER_FILE`, or written there if it does not
            exist. Other workers return two empty strings.
            """
            if not self._group.is_chief:
                return ["", ""]
            storage, owner = open_storage(self._directory), uuid.uuid4().hex
            if storage.has(OWNER_FILE):
                owner = storage.read_text(OWNER_FILE, _OWNER_BYTES)
            else:
                storage.write_text(OWNER_FILE, owner)
            return [owner, uuid.uuid4().hex[:12]]

        own = run_on_all_workers(
            self._group,
            self._directory,
            "saved",
            "Nothing was trained.",
            "the identity of the directory",
            names,
        )
        return self._group.all_gather("the identity of the directory", own)[0]

    def _disable_on_fault(self, faults: Sequence[str]) -> bool:
        """Disable saves in memory if a worker has a fault; worker 0 warns of it.

        All workers call it with the same faults.

        Args:
            faults: Sequence of strings, the fault of each worker, or `""`.

        Returns:
            Bool, whether a worker has a fault.
        """
        rank = next((rank for rank, fault in enumerate(faults) if fault), None)
        if rank is None:
            return False
        if self._group.is_chief:
            user_code.warn(
                "Nothing is saved in memory any more; backups in the directory "
                f"continue. Worker {rank}: {faults[rank].rstrip('.')}."
            )
        self.is_enabled = False
        return True

    def _fits_or_disable(self, sizes: list[int]) -> bool:
        """Return whether all hosts have memory for their parts; disable saves if not.

        A part needs its size twice: saves write to its two slots alternately.

        Args:
            sizes: List of ints, the size of each worker's part in bytes.
        """
        if sizes == self._sizes:
            return True
        missing = sum(
            self._memory.missing_bytes(rank, sizes[rank])
            for rank in self._kept_by(self._group.rank)
        )
        own = [self._host_keys[self._group.rank], missing, host_memory_budget()]
        lack = lack_of_memory(self._group.all_gather("room in memory", own), share=1.0)
        self._sizes = sizes
        if lack is None:
            return True
        faults = [""] * len(sizes)
        faults[lack.rank] = (
            f"the parts of its host take {lack.needed / 1e6:.0f} MB more, and "
            f"{lack.free / 1e6:.0f} MB of its memory are free for them"
        )
        return not self._disable_on_fault(faults)

    def _kept_by(self, worker: int) -> list[int]:
        """Return the ranks of the parts that a worker keeps: its own, then copies."""
        keepers = enumerate(self._keepers or ())
        return [worker, *(other for other, keeper in keepers if keeper == worker)]

    def _kept_on_host(self) -> set[int]:
        """Return the ranks whose parts of the state this host keeps in memory.

        They are the ranks of its own workers, and of those whose copies its workers
        keep.
        """
        own_key = self._host_keys[self._group.rank]
        return {
            part
            for worker, key in enumerate(self._host_keys)
            if key == own_key
            for part in self._kept_by(worker)
        }

    def _copy(
        self, header: PartHeader, state: Sequence[StateTensor]
    ) -> np.ndarray | None:
        """Copy this worker's part of the state into this host's memory.

        Args:
            header: `PartHeader` of the part, written after the copy.
            state: Sequence of `StateTensor`.

        Returns:
            Array of the bytes, or `None` after an error: the part is then invalid, and
            the next save reports the error.
        """
        name = header.name
        try:
            data = self._memory.begin(name.rank, name.slot, header.num_bytes)
            copy_to_host(state, data)
            self._memory.commit(header)
        except Exception as error:  # noqa: BLE001 the next save reports it to all
            self._fault = files.error_text(error)
            return None
        return data

    def _send_copies(
        self,
        parts: tuple[np.ndarray, np.ndarray],
        sizes: tuple[Sequence[int], Sequence[int]],
        slot: int,
    ) -> None:
        """Send a copy of this worker's part to another host; store copies for others.

        Args:
            parts: Tuple of two arrays of bytes: the header and the part.
            sizes: Tuple of the sizes of all workers' headers, and of their parts.
            slot: Int, 0 or 1, the slot of each part that this save writes.
        """
        lower_priority()
        communicator, keepers = self._communicator, self._keepers
        assert communicator is not None
        assert keepers is not None
        rank, nothing = self._group.rank, np.empty(0, np.uint8)
        _, *kept = self._kept_by(rank)
        everyone, keeper = range(len(keepers)), keepers[rank]
        headers = {other: np.empty(sizes[0][other], np.uint8) for other in kept}
        try:
            copies = {o: self._memory.begin(o, slot, sizes[1][o]) for o in kept}
            for part, received in zip(parts, (headers, copies), strict=True):
                communicator.all_to_all(
                    [part if other == keeper else nothing for other in everyone],
                    [received.get(other, nothing) for other in everyone],
                    new_tag(0, f"copies {slot}"),
                )
        except BaseException as error:
            communicator.close(f"it could not keep a copy: {error}")
            raise
        for text in headers.values():
            if (header := text.tobytes()).strip():
                self._memory.commit(PartHeader.from_text(header.decode()))

    def _gather_headers(
        self, complete: CompleteSave, own: dict[PartName, PartHeader]
    ) -> dict[int, PartHeader]:
        """Return the `PartHeader` of each part of a state, by its worker's rank.

        All workers call it: they exchange headers unless each host has all parts.

        Args:
            complete: `CompleteSave` of the state.
            own: Dict from `PartName` to `PartHeader`, the parts on this host.
        """
        headers = {
            name.rank: header
            for name, header in own.items()
            if name.token == complete.name.token
        }
        if complete.is_everywhere(self._group.num_workers):
            return headers
        sent = {
            rank: header.to_text()
            for rank, header in headers.items()
            if complete.holders[rank][0] == self._group.rank
        }
        answers = self._group.all_gather("headers of parts", sent)
        return {
            int(rank): PartHeader.from_text(text)
            for answer in answers
            for rank, text in answer.items()
        }

    def _find(
        self,
        headers: dict[int, PartHeader],
        step: int,
        make_plan: Callable[[Index], LoadPlan],
    ) -> tuple[Index, LoadPlan]:
        """Return the index of a state in memory, and this worker's load plan for it.

        Args:
            headers: Dict from the rank of each part's worker to its `PartHeader`.
            step: Int, number of batches so far, from the names of the parts.
            make_plan: Callable, as in `find_newest`.

        Raises:
            ValueError: If the parts are incomplete, or their metadata has another step.
        """
        self._headers = [headers[rank] for rank in sorted(headers)]
        index = index_of_parts(self._headers)
        load_plan = make_plan(index)
        if index.run["steps"] != step:
            raise ValueError(f"its step is {index.run['steps']}")
        return index, load_plan
