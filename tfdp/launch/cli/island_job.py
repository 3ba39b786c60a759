"""Job of islands: one that fails stops no other, and is started again by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tfdp.communication.cluster.islands import Island
from tfdp.launch.cli.job import Job
from tfdp.launch.cli.worker import Worker, shell_code

_PAUSE_SECONDS = 1.0


class IslandJob(Job):
    """The islands of this machine.

    Args:
        islands: List of `Island`, by worker.
        max_restarts: Int, how often an island is started again after it has failed,
            those of this machine together.
        ended: Callable, which is told the index of an island that has ended for good.
        each_turn: Callable, which is called several times a second.
        **options: As for `Job`.
    """

    def __init__(
        self,
        islands: list[Island],
        max_restarts: int,
        ended: Callable[[int], None],
        each_turn: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._islands = islands
        self._first_rank = islands[0].index
        self._max_restarts = max_restarts
        self._num_restarts = 0
        self._ended = ended
        self._each_turn = each_turn
        # When those that failed are started again, by their place.
        self._starts_at: dict[int, float] = {}
        self._told: set[int] = set()
        self._code = 0

    def _environment(self, index: int) -> dict[str, str]:
        environment = super()._environment(index)
        config = json.loads(environment["TF_CONFIG"])
        self._islands[index].add_to(config)
        return {**environment, "TF_CONFIG": json.dumps(config)}

    def _is_over(self) -> bool:
        self._each_turn()
        self._start_again()
        self._tell_ends()
        return not self._running() and not self._starts_at

    def _end_code(self) -> int:
        return self._code

    def _after_failure(self, failed: Worker) -> None:
        """Start those that have failed again, or leave them out."""
        del failed  # others may have failed at the same time
        self._failed = None
        for index, worker in enumerate(self._workers):
            is_new = worker.pid not in self._told and index not in self._starts_at
            if worker.exit_code and is_new:
                self._told.add(worker.pid)
                self._note_failure(index, worker)

    def _note_failure(self, index: int, worker: Worker) -> None:
        self._recall(worker)
        who = f"island {worker.rank} {worker.describe_end()}"
        if self._num_restarts < self._max_restarts:
            self._num_restarts += 1
            self._starts_at[index] = time.monotonic() + _PAUSE_SECONDS
            follows = (
                f"it starts again in {_PAUSE_SECONDS:g} s "
                f"(restart {self._num_restarts} of {self._max_restarts})"
            )
        else:
            assert worker.exit_code is not None
            self._code = self._code or shell_code(worker.exit_code)
            self._ended(worker.rank)
            follows = "it does not start again"
        self._screen.message(
            f"tfdp: {who}; {follows}, and the others go on. All that it wrote: "
            f"{worker.log.path}",
            "warning",
            rank=worker.rank,
        )

    def _start_again(self) -> None:
        now = time.monotonic()
        for index in [i for i, at in self._starts_at.items() if at <= now]:
            del self._starts_at[index]
            self._start(index)

    def _tell_ends(self) -> None:
        """Tell of islands that are through; nobody waits for them."""
        for worker in self._workers:
            if worker.exit_code == 0 and worker.pid not in self._told:
                self._told.add(worker.pid)
                self._ended(worker.rank)
