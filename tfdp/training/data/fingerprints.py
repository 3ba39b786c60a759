"""Fingerprints of arrays, by which workers compare the values that they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from tfdp.training.data.array_parts import (
    COMPOSITE,
    ArrayPart,
    as_numpy,
    bytes_of,
    bytes_per_array,
    is_scipy_sparse,
    split_into_parts,
)

# Hashes of single rows show that two arrays have the same rows in another order. Python
# computes them one by one, which takes too long for arrays beyond these limits.
_ORDERED_BYTES = 250_000_000
_ORDERED_ROWS = 100_000
# About this many evenly spaced numbers of a row are hashed: they identify a row, and a
# hash of all numbers of a long row would cost more.
_ORDERED_COLUMNS = 64
# Workers send only this many row hashes of an array, by which they notice rows that two
# arrays have in common; all hashes would be a long message.
_NUM_KEPT_HASHES = 32


class ArrayValues:
    """Values of the arrays of this worker, to be compared with those of the others.

    Args:
        arrays: Dict of arrays by name: of NumPy, TensorFlow, pandas, torch or SciPy, or
            in files. `None` is ignored.
        are_sources: Bool, whether the arrays are the sources of a dataset. Their
            strings may be paths; only their base names are compared, because
            workers may have the files in different folders. Defaults to `False`.
    """

    def __init__(self, arrays: dict[str, Any], *, are_sources: bool = False) -> None:
        self._are_sources = are_sources
        self._arrays = arrays
        self._parts = {name: split_into_parts(array) for name, array in arrays.items()}
        budget = bytes_per_array(
            [p.num_bytes for p in self._all_parts() if not p.is_stored]
        )
        for part in self._all_parts():
            part.choose_rows(budget)

    def fingerprints(self) -> dict[str, Any]:
        """Return a fingerprint of each array, by name.

        A fingerprint is a list of two items. The first is a list that has, for each
        `ArrayPart` of the array, such as a column of a table, how many of its rows are
        read. The second is a digest of the values of all these rows, or `None` if they
        cannot be read.
        """
        return {
            name: [[part.num_read for part in parts], self._digest(parts)]
            for name, parts in self._parts.items()
        }

    def describe(self, name: str) -> dict[str, Any] | None:
        """Describe the values of an array in more detail than a fingerprint.

        Returns:
            Dict, or `None` if the array cannot be described. `"parts"` is a list with
            the result of `ArrayPart.describe` for each part of the array;
            `"rows"` is a list of an order-independent digest of all rows and a list of
            some row hashes, or `None` for an array whose rows are not hashed one by
            one; `"paths"` is whether the values are paths.
        """
        parts = self._parts[name]
        try:
            return {
                "parts": [part.describe(self._hash_of(part)) for part in parts],
                "rows": self._rows(name),
                "paths": self._are_sources and any(p.holds_paths() for p in parts),
            }
        except Exception:  # noqa: BLE001 the other workers wait for the description
            return None

    def _all_parts(self) -> Iterator[ArrayPart]:
        """Yield the `ArrayPart`s of all arrays."""
        for parts in self._parts.values():
            yield from parts

    def _digest(self, parts: list[ArrayPart]) -> str | None:
        """Return a SHA-256 of the rows read of all parts; `None` if a read fails."""
        try:
            texts = [self._hash_of(part) for part in parts]
        except Exception:  # noqa: BLE001 a user's array class may raise anything
            return None
        return hashlib.sha256(" ".join(texts).encode()).hexdigest() if texts else None

    def _hash_of(self, part: ArrayPart) -> str:
        """Return a SHA-256 of the shape and the values of the rows read of a part."""
        values = part.read()
        digest = hashlib.sha256(str(values.shape).encode())
        digest.update(bytes_of(values, only_names=self._are_sources))
        return digest.hexdigest()

    def _rows(self, name: str) -> list | None:
        """Return an order-independent digest of an array's rows, and some row hashes.

        Returns:
            List of the digest, and a list of the smallest hashes; or `None` if the
            array is large, ragged, sparse or in a file.
        """
        array, parts = self._arrays[name], self._parts[name]
        num_bytes = sum(part.num_bytes for part in parts)
        is_plain = not isinstance(array, COMPOSITE)
        is_plain = is_plain and not is_scipy_sparse(array)
        is_small = num_bytes <= _ORDERED_BYTES and parts[0].num_rows <= _ORDERED_ROWS
        if not is_plain or not is_small or any(part.is_stored for part in parts):
            return None
        rows = as_numpy(array).reshape(parts[0].num_rows, -1)
        rows = rows[:, :: max(rows.shape[1] // _ORDERED_COLUMNS, 1)]
        hashes = sorted(
            hashlib.blake2b(
                bytes_of(row, only_names=self._are_sources), digest_size=8
            ).hexdigest()
            for row in rows
        )
        whole = hashlib.sha256("".join(hashes).encode()).hexdigest()
        return [whole, sorted(set(hashes))[:_NUM_KEPT_HASHES]]
