"""Headers of collectives, sent ahead of the data and compared by the peers."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
import zlib
from collections.abc import Sequence

import numpy as np

from tfdp.communication.transport.communicator import Array, TransportError
from tfdp.ground.text import pluralize

_HEADER = struct.Struct("!16s12sIQQ")
HEADER_BYTES = _HEADER.size
_MASK = (1 << 64) - 1
# The first 16 bits of a tag count the failed steps of its worker, so that an error can
# report that a step failed on some workers only. The last 48 bits identify the
# collective.
_GENERATIONS, _REST_BITS = 1 << 16, 48
_STEPS_DIFFER = "An earlier step ended with an error on some workers only"
_ERRORS = re.compile(rf"{_STEPS_DIFFER}: (\d+) of .*?, (\d+) of ")


@dataclasses.dataclass(frozen=True)
class CollectiveHeader:
    """Description of a collective, which members of its group exchange and compare.

    Args:
        kind: String, such as `"all-reduce"`.
        tag: Int of 64 bits, identity of the collective.
        num_bytes: Int, length of the array; in an all-to-all, of the peer's part.
        dtype: String, name of the array's dtype.
        bounds: Int, checksum of the bounds of the members' parts, or 0 without bounds.
    """

    kind: str
    tag: int
    num_bytes: int = 0
    dtype: str = ""
    bounds: int = 0

    def packed(self) -> bytes:
        """Pack all fields into the header that is sent, `HEADER_BYTES` long."""
        return _HEADER.pack(
            self.kind.encode(),
            self.dtype.encode()[:12],
            self.bounds,
            self.tag & _MASK,
            self.num_bytes,
        )

    def __str__(self) -> str:
        what = ""
        if self.dtype:
            what = f" of {pluralize(self.num_bytes, 'byte')} of {self.dtype}"
        return f"{self.kind}{what} (tag {self.tag & _MASK:#x})"


def call_of(
    kind: str, array: Array, tag: int, bounds: Sequence[int] | None = None
) -> CollectiveHeader:
    """Create the `CollectiveHeader` of a collective of an array, which peers compare.

    Args:
        kind: String, such as `"all-reduce"`.
        array: Flat array.
        tag: Int, identity of the collective.
        bounds: Sequence of ints, the bounds of the members' parts of the array, which
            must be the same on all members; or `None` for none. Defaults to `None`.

    Returns:
        `CollectiveHeader`.

    Example:
    >>> str(call_of("all-reduce", np.zeros(2, "float32"), tag=7))
    'all-reduce of 8 bytes of float32 (tag 0x7)'
    """
    checksum = 0 if bounds is None else zlib.crc32(np.asarray(bounds, "<i8").tobytes())
    return CollectiveHeader(kind, tag, array.nbytes, array.dtype.name, checksum)


def new_tag(generation: int, text: str) -> int:
    """Return the number by which members check that they run the same collective.

    Args:
        generation: Int, number of steps of this worker that have failed.
        text: String, the same on all members, different for other collectives.

    Returns:
        Int of 64 bits.
    """
    digest = hashlib.sha256(text.encode()).digest()[: _REST_BITS // 8]
    rest = int.from_bytes(digest, "big")
    return generation % _GENERATIONS << _REST_BITS | rest


def steps_ahead(error: Exception, generation: int) -> int | None:
    """Return by how many failed steps other workers are ahead of this worker.

    Args:
        error: Exception of a collective, detected here or by another member.
        generation: Int, number of steps of this worker that had failed before the
            collective, as for `new_tag`.

    Returns:
        Int, the number of failed steps by which another member is ahead of
        `generation`, 0 if none is; `None` if the error is not about different numbers
        of failed steps.

    Example:
    >>> tags = [new_tag(generation, "") for generation in (1, 2)]
    >>> calls = [CollectiveHeader("barrier", tag) for tag in tags]
    >>> try:
    ...     check(calls[1].packed(), calls[0], own=0, peer=1)
    ... except TransportError as error:
    ...     [steps_ahead(error, generation) for generation in (1, 2)]
    [1, 0]
    """
    found = _ERRORS.search(str(error))
    if found is None:
        return None
    half = _GENERATIONS // 2
    ahead = [
        (int(text) - generation + half) % _GENERATIONS - half for text in found.groups()
    ]
    return max(0, *ahead)


def check(
    received: bytes | memoryview, expected: CollectiveHeader, own: int, peer: int
) -> None:
    """Raise an error if the header from a peer is not of the expected collective.

    Args:
        received: Buffer, the header from the peer.
        expected: `CollectiveHeader` that the peer should have sent.
        own: Int, the rank of this worker.
        peer: Int, the rank of the peer.

    Raises:
        TransportError: If the peer calls another collective.
    """
    if received == expected.packed():
        return
    kind, dtype, bounds, tag, num_bytes = _HEADER.unpack(received)
    _check_steps(tag, expected.tag, own, peer)
    other = CollectiveHeader(
        kind.rstrip(b"\0").decode(errors="replace"),
        tag,
        num_bytes,
        dtype.rstrip(b"\0").decode(errors="replace"),
        bounds,
    )
    differ = " with other bounds" if str(other) == str(expected) else ""
    raise TransportError(
        f"The workers run different collectives: worker {peer} is at {other}{differ}, "
        f"and worker {own} at {expected}. Every worker has to run the same steps of "
        "the same program."
    )


def _check_steps(received_tag: int, expected_tag: int, own: int, peer: int) -> None:
    """Raise `TransportError` if two tags have different generations.

    A generation is the number of a worker's steps that have failed.

    Args:
        received_tag: Int, tag of the peer's call.
        expected_tag: Int, tag of this worker's call.
        own: Int, the rank of this worker.
        peer: Int, the rank of the peer.
    """
    theirs, ours = received_tag >> _REST_BITS, (expected_tag & _MASK) >> _REST_BITS
    if theirs != ours:
        raise TransportError(
            f"{_STEPS_DIFFER}: {ours} of worker {own}'s steps so far, {theirs} of "
            f"worker {peer}'s. A script that continues after an error must do so on "
            "every worker."
        )
