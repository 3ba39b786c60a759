"""Parts of a state in the memory of hosts: their headers, places and layout.

Each worker's part holds the elements that this worker would write into a checkpoint,
one shard after another, in the layout of `tfdp.checkpoint.copies.copy_to_host`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdp.checkpoint import schema
from tfdp.checkpoint.copies import aligned
from tfdp.checkpoint.index import (
    ITEM_BYTES,
    Extent,
    Index,
    Shard,
    TensorMetadata,
    check_index,
)
from tfdp.checkpoint.index_file import (
    EXTENTS,
    TENSORS,
    tensors_from_json,
    verified_content,
    with_checksum,
)

_NAME = {
    "token": schema.name,
    "step": schema.COUNT,
    "in_epoch": schema.boolean,
    "slot": range(2),
    "num_workers": schema.POSITIVE,
    "rank": schema.COUNT,
}
_CONTENT = {
    "name": _NAME,
    "owner": schema.name,
    "tensors": TENSORS,
    "extents": EXTENTS,
    "versions": schema.mapping(schema.name),
    "run": schema.check_depth,
}


class PartName(NamedTuple):
    """Identity of a part: the elements of a saved state that one worker has saved.

    Args:
        token: String, identity of the save, the same for all its parts.
        step: Int, number of batches so far.
        in_epoch: Bool, whether the state was saved within an epoch. The end of an epoch
            has two saves of one step: one after its last batch, and a later one.
        slot: Int, 0 or 1, the one of two files of a part that saves write alternately.
        num_workers: Int, number of parts of the save.
        rank: Int, the worker whose part it is.
    """

    token: str
    step: int
    in_epoch: bool
    slot: int
    num_workers: int
    rank: int

    @property
    def order(self) -> tuple[int, bool]:
        """Tuple to compare parts by age: it is larger for a part of a later save."""
        return self.step, not self.in_epoch


@dataclasses.dataclass(frozen=True)
class PartHeader:
    """Metadata of a part in memory; a part is valid once its header is written.

    Args:
        name: `PartName`.
        owner: String, identity of the directory of backups.
        tensors: Tuple of `TensorMetadata`, those of the whole state.
        extents: Tuple of `Extent`, the elements of the part, in order.
        versions: Dict from packages to their versions.
        run: Metadata of the run, a value that JSON supports, in the part of rank 0;
            `None` in other parts.
    """

    name: PartName
    owner: str
    tensors: tuple[TensorMetadata, ...]
    extents: tuple[Extent, ...]
    versions: dict[str, str]
    run: Any

    def to_text(self) -> str:
        """Format the header as JSON with a checksum."""
        content = {field: getattr(self, field) for field in _CONTENT}
        return with_checksum(content | {"name": self.name._asdict()})

    @classmethod
    def from_text(cls, text: str) -> PartHeader:
        """Parse the result of `to_text`.

        Raises:
            ValueError: If the text was altered, or is not a header.
        """
        content = verified_content(text)
        schema.check(content, _CONTENT, "content")
        tensors = tensors_from_json(content["tensors"])
        extents = tuple(Extent(*extent) for extent in content["extents"])
        if any(extent.tensor >= len(tensors) for extent in extents):
            raise ValueError("it has elements of a tensor that it does not list")
        return cls(
            PartName(**content["name"]),
            content["owner"],
            tensors,
            extents,
            content["versions"],
            content["run"],
        )

    @property
    def num_bytes(self) -> int:
        """Int, size of the part in bytes."""
        return sum(aligned(self._size(extent)) for extent in self.extents)

    def offsets(self) -> dict[Extent, int]:
        """Return the offset in bytes of each extent in the part.

        Example:

        >>> name = PartName("a", 5, False, 0, num_workers=1, rank=0)
        >>> x = TensorMetadata("x", (9,), "float32")
        >>> tensors = x, TensorMetadata("y", (1,), "int8")
        >>> extents = Extent(0, 0, 9), Extent(1, 0, 1)
        >>> header = PartHeader(name, "", tensors, extents, {}, None)
        >>> list(header.offsets().values()), header.num_bytes
        ([0, 64], 128)
        """
        offset, found = 0, {}
        for extent in self.extents:
            found[extent] = offset
            offset += aligned(self._size(extent))
        return found

    def _size(self, extent: Extent) -> int:
        """Return the size of an extent in bytes."""
        item_bytes = ITEM_BYTES[self.tensors[extent.tensor].dtype]
        return (extent.stop - extent.start) * item_bytes


@dataclasses.dataclass(frozen=True)
class CompleteSave:
    """Save that can be read: each of its parts is in the memory of at least one host.

    Args:
        name: `PartName` of its first part.
        holders: Tuple with a list of ints for each part, the ranks of the workers whose
            hosts have the part, in order.
    """

    name: PartName
    holders: tuple[list[int], ...]

    def source(self, part: int, worker: int) -> int:
        """Return the worker from whose host a worker reads a part.

        That is the reading worker if its own host has the part. Otherwise its rank
        decides, which distributes the readers among the hosts.

        Args:
            part: Int, rank of the worker whose part it is.
            worker: Int, rank of the worker that reads.
        """
        found = self.holders[part]
        return worker if worker in found else found[worker % len(found)]

    def is_everywhere(self, num_workers: int) -> bool:
        """Return whether the host of each worker has all parts.

        Args:
            num_workers: Int, number of workers of the present run.
        """
        return all(len(found) == num_workers for found in self.holders)


def newest_complete_save(
    host_keys: Sequence[str], found: Sequence[Sequence[PartName]]
) -> CompleteSave | None:
    """Return the newest save whose parts are all in the memory of some host.

    Args:
        host_keys: Sequence of strings, equal for workers that see the same memory.
        found: Sequence with the parts that each worker has found.

    Example:

    >>> both = [PartName("a", 4, True, 0, 2, rank) for rank in (0, 1)]
    >>> newer = PartName("b", 5, True, 1, 2, rank=0)
    >>> newest_complete_save(["x", "y"], [[both[0], newer], both]).holders
    ([0, 1], [1])
    """
    parts: dict[tuple[str, int], dict[int, set[str]]] = {}
    names: dict[tuple[str, int], PartName] = {}
    for key, own in zip(host_keys, found, strict=True):
        for name in own:
            save = name.token, name.num_workers
            parts.setdefault(save, {}).setdefault(name.rank, set()).add(key)
            names[save] = name._replace(rank=0)
    complete = [save for save in parts if set(parts[save]) == set(range(save[1]))]
    if not complete:
        return None
    newest = max(complete, key=lambda save: names[save].order)
    holders = tuple(
        [worker for worker, key in enumerate(host_keys) if key in parts[newest][rank]]
        for rank in range(newest[1])
    )
    return CompleteSave(names[newest], holders)


def keepers_of_copies(host_keys: Sequence[str]) -> list[int] | None:
    """Return for each worker the worker on the next host that keeps a copy of its part.

    Args:
        host_keys: Sequence of strings, equal for workers that see the same memory.

    Returns:
        List of ints, or `None` if there is only one host.

    Example:

    >>> keepers_of_copies(["a", "a", "b", "b", "c"])
    [2, 3, 4, 4, 0]
    >>> keepers_of_copies(["a", "a"]) is None
    True
    """
    members: dict[str, list[int]] = {}
    for rank, key in enumerate(host_keys):
        members.setdefault(key, []).append(rank)
    hosts = list(members)
    if len(hosts) == 1:
        return None
    following = dict(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return [
        (others := members[following[key]])[members[key].index(rank) % len(others)]
        for rank, key in enumerate(host_keys)
    ]


def index_of_parts(headers: Sequence[PartHeader]) -> Index:
    """Return the index of a state from the headers of all its parts, ordered by rank.

    Raises:
        ValueError: If the parts do not hold every element exactly once.
    """
    first = headers[0]
    shards = tuple(
        Shard(f"worker-{header.name.rank}", header.name.rank, (), header.extents)
        for header in headers
    )
    index = Index(
        first.name.token, first.tensors, shards, first.versions, run=first.run
    )
    check_index(index)
    return index
