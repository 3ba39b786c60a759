"""Keras `fit` of the same model with and without tfdp, in one process."""

from __future__ import annotations

from typing import Any

from tfdp.launch.bench.channel import Variants, work


def make_variants(setup: dict[str, Any]) -> Variants:
    import keras

    import tfdp
    from tfdp.launch.bench.fit import fit_variant
    from tfdp.training.optimizer.distributed import DistributedOptimizer
    from tools.bench.models import MODELS

    def wrapped() -> Any:
        return DistributedOptimizer(keras.optimizers.SGD(1e-3))

    strategy, model = tfdp.MirroredStrategy(["CPU:0"]), MODELS["mlp"]
    return {
        "plain": fit_variant(None, model),
        "tfdp": fit_variant(strategy, model),
        "wrapped": fit_variant(None, model, make_optimizer=wrapped),
        "wrapped, tfdp": fit_variant(strategy, model, make_optimizer=wrapped),
    }


if __name__ == "__main__":
    work(make_variants)
