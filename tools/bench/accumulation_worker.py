"""One process that trains with gradient accumulation, alone or with others."""

from __future__ import annotations

from typing import Any

from tfdp.launch.bench.channel import Variants, timed, work
from tfdp.launch.bench.training import make_strategy, training_step
from tools.bench.models import MODELS


def make_variants(setup: dict[str, Any]) -> Variants:
    strategy = make_strategy(setup)
    steps = setup["accumulation_steps"]

    def make_optimizer() -> Any:
        import keras

        from tfdp.training.optimizer.distributed import DistributedOptimizer

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
    return {"micro-batch": timed(step)}


if __name__ == "__main__":
    work(make_variants)
