"""Asynchronous short texts from all workers to the first one."""

from __future__ import annotations

import tensorflow as tf

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import _compat


class Mailbox:
    """Key-value mailbox of the first worker, with texts by number and rank.

    All workers have to create their mailboxes in the same order.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.rank = worker_group.rank
        self.num_workers = worker_group.num_workers
        self._prefix = worker_group.new_prefix()

    def send(self, number: int, text: str) -> None:
        """Send a text to the first worker.

        Args:
            number: Int, a new one for each text.
            text: String.
        """
        _compat.set_key_value(f"{self._prefix}/{number}/{self.rank}", text)

    def receive(self, number: int, rank: int, timeout_seconds: float) -> str | None:
        """Receive a text of another worker.

        Args:
            number: Int.
            rank: Int, the other worker's.
            timeout_seconds: Float, the longest wait.

        Returns:
            String, or `None` if it did not come in time.
        """
        key = f"{self._prefix}/{number}/{rank}"
        try:
            text = _compat.get_key_value(key, timeout_seconds)
        except tf.errors.DeadlineExceededError:
            return None
        _compat.delete_key_value(key)
        return text
