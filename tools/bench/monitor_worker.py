"""One worker that trains by Keras `fit`, with the communication monitor or without."""

from __future__ import annotations

import tempfile
from typing import Any

from tfdp.launch.bench.channel import Arms, work
from tfdp.launch.bench.training import make_strategy


def make_arms(setup: dict[str, Any]) -> Arms:
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

    return {"off": block, "on": on}


if __name__ == "__main__":
    work(make_arms)
