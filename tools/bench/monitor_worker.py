"""One worker that trains by Keras `fit`, with the communication monitor or without."""

from __future__ import annotations

import json
import sys
import tempfile

from tfdp.bench.channel import serve, take_over_output
from tfdp.bench.training import make_strategy


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    strategy = make_strategy(setup)

    from tfdp.callbacks import CommunicationMonitor
    from tools.bench.fit_blocks import SKIPPED, block_of

    block = block_of(strategy, setup["model"])
    folder = tempfile.TemporaryDirectory(prefix="tfdp-monitor-")

    def on(steps: int) -> dict[str, float]:
        monitor = CommunicationMonitor(folder.name, every=10)
        result = block(steps, monitor)
        last = monitor.recent(steps - SKIPPED)
        parts = (last.compute_seconds + last.exposed_seconds) / last.step_seconds
        return {**result, "parts": parts}

    serve({"off": block, "on": on})


if __name__ == "__main__":
    main()
