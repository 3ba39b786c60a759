"""Workers send short texts to the first one, and nobody waits for anybody."""

from __future__ import annotations

import tensorflow as tf

from tfdp import _compat
from tfdp.coordination.worker_group import WorkerGroup


class Mailbox:
    """Texts by number, from every worker to the first.

    All workers have to make their mailboxes in the same order.

    Args:
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.rank = worker_group.rank
        self.num_workers = worker_group.num_workers
        self._prefix = worker_group.new_prefix()

    def send(self, number: int, text: str) -> None:
        """Leaves a text for the first worker.

        Args:
            number: Int, a new one for each text.
            text: String.
        """
        _compat.set_key_value(f"{self._prefix}/{number}/{self.rank}", text)

    def receive(self, number: int, rank: int, timeout_seconds: float) -> str | None:
        """A text of another worker.

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
