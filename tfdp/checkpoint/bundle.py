"""Layout of a shard's data file, read from the `.index` file that TensorFlow writes.

That file is a table of LevelDB's format without compression: from the key of each
tensor to a `BundleEntryProto`. TensorFlow's own reader opens both files by name, and so
would read other bytes than those whose checksums were compared.

Source: https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfdp.ground import _compat

# Size in bytes of the end of a table, and its last eight bytes.
_FOOTER_BYTES = 48
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
# Largest shift of a byte's seven bits in a number of 64 bits.
_MOST_BITS = 63


def read_layout(content: bytes) -> dict[str, Any]:
    """Return the place of each tensor in a data file, by the tensor's key.

    Args:
        content: Bytes, the content of the `.index` file.

    Returns:
        Dict from keys to `BundleEntryProto`, which have dtype, offset and size.

    Raises:
        ValueError: If the bytes do not end as such a table does.
    """
    footer = content[-_FOOTER_BYTES:]
    if footer[-8:] != _MAGIC:
        raise ValueError("it is no index of a checkpoint of TensorFlow")
    _, at = _handle(footer, 0)  # the block of metadata is not used
    blocks, _ = _handle(footer, at)
    return {
        key.decode(): _compat.bundle_entry(value)
        for _, handle in _entries(content[blocks])
        for key, value in _entries(content[_handle(handle, 0)[0]])
        if key  # the empty key is that of the header
    }


def _handle(data: bytes, at: int) -> tuple[slice, int]:
    """Parse a block's place at an offset; return its slice and the offset after it."""
    offset, at = _number(data, at)
    size, at = _number(data, at)
    return slice(offset, offset + size), at


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block, where keys omit what the previous one has."""
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    at, key = 0, b""
    while at < end:
        shared, at = _number(block, at)
        rest, at = _number(block, at)
        size, at = _number(block, at)
        key = key[:shared] + block[at : at + rest]
        yield key, block[at + rest : at + rest + size]
        at += rest + size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Parse an int of seven bits per byte; return it and the offset after it."""
    value = shift = 0
    while data[at] & 0x80:
        if shift > _MOST_BITS:
            raise ValueError("it has a number of more than 64 bits")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
