"""Short texts by key, which all workers of a job share: the interface."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Key-value store of a job, over which its workers find each other."""

    def put(self, key: str, text: str) -> None:
        """Set the text of a key, once."""

    def get(self, key: str, timeout_seconds: float) -> str:
        """Return the text of a key, and wait until there is one.

        Args:
            key: String.
            timeout_seconds: Float, the longest wait.

        Raises:
            TimeoutError: If there is no text in time.
        """
