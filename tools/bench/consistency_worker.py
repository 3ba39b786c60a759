"""One worker that trains by Keras `fit`, looked after or not."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from unittest import mock

from tfdp.bench.channel import serve, take_over_output
from tfdp.bench.training import make_strategy


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
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

    serve({"off": off, "on": on})


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """This worker neither gives signs of life nor looks for those of others."""
    from tfdp.coordination.watch.heartbeat import Heartbeat
    from tfdp.coordination.watch.watchdog import Watchdog

    def nothing(thread: object) -> None:
        del thread

    with (
        mock.patch.object(Heartbeat, "_beat", nothing),
        mock.patch.object(Watchdog, "_look", nothing),
    ):
        yield


if __name__ == "__main__":
    main()
