"""One worker that trains by Keras `fit`, with the consistency check or without."""

from __future__ import annotations

import json
import sys

from tfdp.bench.channel import serve, take_over_output
from tfdp.bench.training import make_strategy


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    strategy = make_strategy(setup)

    from tfdp.callbacks import ConsistencyCheck
    from tools.bench.fit_blocks import SKIPPED, block_of

    block = block_of(strategy, setup["model"])

    def off(steps: int) -> dict[str, float]:
        return block(steps + SKIPPED + 1)

    def on(steps: int) -> dict[str, float]:
        return block(steps + SKIPPED + 1, ConsistencyCheck(every=setup["every"]))

    serve({"off": off, "on": on})


if __name__ == "__main__":
    main()
