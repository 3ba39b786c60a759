"""One process that trains with gradient accumulation, alone or with others."""

from __future__ import annotations

import json
import sys
from typing import Any

from tfdp.bench.channel import serve, take_over_output
from tfdp.bench.training import make_strategy, timed, training_step
from tools.bench.models import MODELS


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    strategy = make_strategy(setup)
    steps = setup["accumulation_steps"]

    def make_optimizer() -> Any:
        import keras

        from tfdp.optimizer.distributed import DistributedOptimizer

        if strategy is None:
            return keras.optimizers.Adam(1e-3, gradient_accumulation_steps=steps)
        adam = keras.optimizers.Adam(1e-3)
        return DistributedOptimizer(adam, accumulation_steps=steps)

    step = training_step(
        strategy,
        MODELS[setup["model"]],
        make_optimizer=make_optimizer,
        batch_size=setup["batch_size"],
    )
    serve({"micro-batch": timed(step)})


if __name__ == "__main__":
    main()
