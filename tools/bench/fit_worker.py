"""Keras `fit` of the same model with and without tfdp, in one process."""

from __future__ import annotations

from typing import Any

from tfdp.launch.bench.channel import Arms, work


def make_arms(setup: dict[str, Any]) -> Arms:
    import keras

    import tfdp
    from tfdp.launch.bench.fit import fit_arm
    from tfdp.training.optimizer.distributed import DistributedOptimizer
    from tools.bench.models import MODELS

    def wrapped() -> Any:
        return DistributedOptimizer(keras.optimizers.SGD(1e-3))

    strategy, model = tfdp.MirroredStrategy(["CPU:0"]), MODELS["mlp"]
    return {
        "plain": fit_arm(None, model),
        "tfdp": fit_arm(strategy, model),
        "wrapped": fit_arm(None, model, make_optimizer=wrapped),
        "wrapped, tfdp": fit_arm(strategy, model, make_optimizer=wrapped),
    }


if __name__ == "__main__":
    work(make_arms)
