"""Read a state from the memory of this host, and the missing parts from other hosts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tfdp.checkpoint.host_memory import HostMemory
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.memory_parts import CompleteSave, PartHeader
from tfdp.checkpoint.reader import LoadPlan, ReadItem, group_reads
from tfdp.communication.transport import Communicator, new_tag
from tfdp.training.sharding.state_tensors import StateTensor


class PartRange(NamedTuple):
    """Range of bytes to read from one worker's part of a state in memory.

    Args:
        part: Int, rank of the worker whose part it is.
        start: Int, offset of the first byte in the part.
        stop: Int, offset after the last byte.
    """

    part: int
    start: int
    stop: int


class PartsReader:
    """Reader of a state whose parts are in the memory of hosts.

    Workers request the ranges that they lack, for one batch of variables after another.
    A batch has at least one variable, or one slice of a variable.

    Args:
        complete: `CompleteSave`.
        headers: Sequence of the `PartHeader` of each part, by rank.
        index: `Index` of the state.
        rank: Int, rank of this worker.
    """

    def __init__(
        self,
        complete: CompleteSave,
        headers: Sequence[PartHeader],
        index: Index,
        rank: int,
    ) -> None:
        self._complete_save, self._headers = complete, headers
        self._index, self._rank = index, rank
        self._offsets = [header.offsets() for header in headers]
        self._arrays: dict[int, np.ndarray] = {}
        self._communicator: Communicator | None = None
        # The pieces that each worker requests in each exchange, indexed by exchange and
        # then by worker. Requests of other workers are included, since this worker
        # sends them pieces.
        self._rounds: list[list[list[PartRange]]] = []

    def map_parts(self, memory: HostMemory) -> None:
        """Map the parts in the memory of this host, to read them without a copy.

        Raises:
            ValueError: If the file of a part is shorter than its header says.
            OSError: If a file cannot be read.
        """
        for part, header in enumerate(self._headers):
            if self._rank in self._complete_save.holders[part]:
                self._arrays[part] = memory.read(header)

    def requests(self, state: Sequence[StateTensor]) -> list[list[PartRange]]:
        """Return the ranges that this host lacks, a list for each batch of variables.

        Args:
            state: Sequence of `StateTensor` to read into.
        """
        return [
            [
                piece
                for item in items
                for piece, _ in self._pieces(item)
                if piece.part not in self._arrays
            ]
            for items in group_reads(state, self._index)
        ]

    def exchange_requests(
        self, communicator: Communicator, requests: list[list[PartRange]]
    ) -> None:
        """Exchange the lists of requests between all workers, before `read` is called.

        `read` then exchanges the pieces, one batch of variables after another.

        Args:
            communicator: `Communicator` of all workers.
            requests: List, the result of `requests`: for each batch of variables, the
                ranges that this host lacks.
        """
        self._communicator = communicator
        own, num_workers = json.dumps(requests).encode(), len(communicator.ranks)
        sizes = np.zeros(num_workers, np.int64)
        sizes[self._rank] = len(own)
        tag = new_tag(0, "sizes of requests")
        communicator.all_gather(sizes, range(num_workers + 1), tag)
        bounds = [0, *itertools.accumulate(sizes.tolist())]
        everything = np.empty(bounds[-1], np.uint8)
        everything[bounds[self._rank] :][: len(own)] = np.frombuffer(own, np.uint8)
        communicator.all_gather(everything, bounds, new_tag(0, "requests"))
        texts = (
            everything[a:b].tobytes().decode() for a, b in itertools.pairwise(bounds)
        )
        rounds = itertools.zip_longest(*map(json.loads, texts), fillvalue=[])
        self._rounds = [
            [[PartRange(*row) for row in rows] for rows in each] for each in rounds
        ]

    def read(self, load_plan: LoadPlan) -> None:
        """Read the values of a load plan into the variables of this worker.

        Args:
            load_plan: `LoadPlan` with the tensors to read.
        """
        load_plan.clear()
        batches = group_reads(load_plan.tensors, self._index)
        try:
            for items, number in itertools.zip_longest(
                batches, range(len(self._rounds))
            ):
                received = {} if number is None else self._exchange(number)
                for item in items or ():
                    self._fill(item, received)
        except BaseException as error:
            # `close` ends the exchange on the other workers too, which would otherwise
            # wait for the pieces of this one.
            if self._communicator is not None:
                self._communicator.close(f"it could not read a state: {error}")
            raise

    def _fill(self, item: ReadItem, received: dict[int, Iterator[np.ndarray]]) -> None:
        """Copy the values of an item from parts here and from other hosts; assign them.

        Args:
            item: `ReadItem`.
            received: Dict from a worker to the pieces that this worker has received
                from it, in order.
        """
        for piece, target in self._pieces(item):
            array = self._arrays.get(piece.part)
            if array is not None:
                target[:] = array[piece.start : piece.stop]
            else:
                target[:] = next(
                    received[self._complete_save.source(piece.part, self._rank)]
                )
        item.assign()

    def _exchange(self, number: int) -> dict[int, Iterator[np.ndarray]]:
        """Send other workers the pieces that they requested; receive this worker's.

        Args:
            number: Int, from 0, the number of the batch of variables. Each batch has
                one exchange.

        Returns:
            Dict from each worker to an iterator of the pieces received from it, arrays
            of bytes in the order of this worker's requests.
        """
        assert self._communicator is not None
        requests = self._rounds[number]
        nothing = np.empty(0, np.uint8)
        sent, received, sizes = [], [], []
        for worker, pieces in enumerate(requests):
            wanted = [
                self._arrays[piece.part][piece.start : piece.stop]
                for piece in pieces
                if self._complete_save.source(piece.part, worker) == self._rank
            ]
            sent.append(np.concatenate([nothing, *wanted]))
            sizes.append(
                [
                    piece.stop - piece.start
                    for piece in requests[self._rank]
                    if self._complete_save.source(piece.part, self._rank) == worker
                ]
            )
            received.append(np.empty(sum(sizes[-1]), np.uint8))
        self._communicator.all_to_all(sent, received, new_tag(0, f"pieces {number}"))
        return {
            worker: iter(np.split(array, np.cumsum(sizes[worker])[:-1]))
            for worker, array in enumerate(received)
        }

    def _pieces(self, item: ReadItem) -> Iterator[tuple[PartRange, np.ndarray]]:
        """Yield the pieces of parts that hold the elements of an item.

        Args:
            item: `ReadItem`.

        Returns:
            Iterator of pairs of a `PartRange`, and an array of uint8, the bytes of
            `item.values` to fill from it.
        """
        target, size = item.values.view(np.uint8), item.values.itemsize
        first = item.extent.start
        for shard, extent in self._index.find(item.extent):
            start = max(extent.start, first)
            stop = min(extent.stop, item.extent.stop)
            begin = self._offsets[shard.worker][extent] - extent.start * size
            piece = PartRange(shard.worker, begin + start * size, begin + stop * size)
            yield piece, target[(start - first) * size : (stop - first) * size]
