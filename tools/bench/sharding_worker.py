"""One worker whose optimizer's state is sharded, or is not."""

from __future__ import annotations

import math
import os
from typing import Any

import psutil

from tfdp.launch.bench.channel import Variants, timed, work
from tfdp.launch.bench.training import make_strategy, training_step
from tools.bench.models import MODELS


def make_variants(setup: dict[str, Any]) -> Variants:
    strategy = make_strategy(setup)
    made: list[Any] = []

    def make_optimizer() -> Any:
        import keras

        from tfdp.training.optimizer.distributed import DistributedOptimizer

        steps, sharding = setup["accumulation_steps"], setup["sharding"]
        adam = keras.optimizers.Adam(1e-3)
        made.append(
            DistributedOptimizer(adam, accumulation_steps=steps, sharding=sharding)
        )
        return made[0]

    step = training_step(
        strategy,
        MODELS[setup["model"]],
        make_optimizer=make_optimizer,
        batch_size=setup["batch_size"],
    )
    resident = psutil.Process(os.getpid()).memory_info().rss
    memory = made[0].memory_report()
    return {
        "step": timed(step),
        "resident": lambda steps: resident,
        "slots": lambda steps: _slot_bytes(made[0]),
        "predicted": lambda steps: memory.sharded.slots + memory.sharded.accumulators,
    }


def _slot_bytes(optimizer: Any) -> int:
    """Bytes of the slots that this process really holds."""
    if optimizer.shards is None:
        slots = optimizer.inner_optimizer.variables[2:]  # after counter and rate
    else:
        states = [s for p in optimizer.shards.parts.values() for s in p.replicas]
        slots = [v for s in states for items in s.slots.values() for v in items]
    return sum(math.prod(slot.shape) * slot.value.dtype.size for slot in slots)


if __name__ == "__main__":
    work(make_variants)
