"""Keras `fit` of the same model with and without tfdp, in one process."""

from __future__ import annotations

from typing import Any

from tfdp.bench.channel import Arm, Arms, work

BATCH_SIZE = 32


def fit_arm(strategy: Any, *, wrapped: bool = False) -> Arm:
    """Seconds per step of `fit`, from the end of the first step on."""
    import contextlib

    import keras

    from tfdp.bench.keras_models import build, make_batch
    from tfdp.optimizer.distributed import DistributedOptimizer
    from tools.bench.fit_blocks import Clock
    from tools.bench.models import MODELS

    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(MODELS["mlp"])
        optimizer: Any = keras.optimizers.SGD(1e-3)
        if wrapped:
            optimizer = DistributedOptimizer(optimizer)
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    def run(steps: int) -> float:
        x, y = make_batch(MODELS["mlp"], steps * BATCH_SIZE)
        clock = Clock(skipped=0)
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def make_arms(setup: dict[str, Any]) -> Arms:
    import tfdp

    strategy = tfdp.MirroredStrategy(["CPU:0"])
    return {
        "plain": fit_arm(None),
        "tfdp": fit_arm(strategy),
        "wrapped": fit_arm(None, wrapped=True),
        "wrapped, tfdp": fit_arm(strategy, wrapped=True),
    }


if __name__ == "__main__":
    work(make_arms)
