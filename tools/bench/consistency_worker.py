"""One worker that trains by Keras `fit`, looked after or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tfdp.launch.bench.channel import Arms, work
from tfdp.launch.bench.training import make_strategy


def make_arms(setup: dict[str, Any]) -> Arms:
    strategy = make_strategy(setup)

    from tfdp.callbacks import ConsistencyCheck
    from tools.bench.fit_blocks import block_of

    every = setup["every"]
    # The first check, which TensorFlow has to get ready for, is not timed.
    block = block_of(strategy, setup["model"], skipped=every + 5)

    def off(steps: int) -> dict[str, float]:
        with _unwatched():
            return block(steps + every + 6)

    def on(steps: int) -> dict[str, float]:
        return block(steps + every + 6, ConsistencyCheck(every=every))

    return {"off": off, "on": on}


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Run without heartbeats and without the watchdog."""
    from tfdp.communication.coordination.watch.heartbeat import Heartbeat
    from tfdp.communication.coordination.watch.watchdog import Watchdog

    def nothing(thread: object) -> None:
        del thread

    with (
        mock.patch.object(Heartbeat, "_beat", nothing),
        mock.patch.object(Watchdog, "_check_workers", nothing),
    ):
        yield


if __name__ == "__main__":
    work(make_arms)
