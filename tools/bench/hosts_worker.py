"""One TensorFlow process of the benchmarks on two hosts: a strategy per variant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import Variants, timed, work
from tfdp.launch.bench.training import (
    make_strategy,
    sums_in_packs,
    training_step,
)
from tools.bench.barrier import barrier
from tools.bench.models import MODELS


def make_strategies(setup: dict[str, Any]) -> dict[str, Any]:
    """A strategy for each variant: tfdp's with its options, or the stock strategy."""
    import tfdp

    strategies: dict[str, Any] = {}
    for name, options in setup["variants"].items():
        if not strategies:
            told = options if setup["strategy"] == "tfdp" else {}
            strategies[name] = make_strategy({**setup, "communication": told})
        elif setup["strategy"] == "tfdp":
            # The process has its server now, and its number of threads.
            strategies[name] = tfdp.MultiWorkerMirroredStrategy(
                communication=tfdp.CommunicationOptions(**options)
            )
        else:
            strategies[name] = next(iter(strategies.values()))
    return strategies


def pack_bytes_of(setup: dict[str, Any], variant: str) -> int:
    """The stock strategy's pack size in a variant; `0` is its own choice."""
    return setup["variants"][variant].get("pack_bytes", 0)


def gradients_step(
    strategy: Any, values: list[Any], pack_bytes: int = 0
) -> Callable[[], Any]:
    """A traced sum of gradients over the replicas, as a Keras optimizer asks for it.

    Not `all_reduce` of the replica context: what are no gradients is not compressed.
    """
    import keras
    import tensorflow as tf

    class Discards(keras.optimizers.Optimizer):
        """Optimizer that has gradients reduced and does nothing with them."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            """Leave the variable as it is."""

    with strategy.scope():
        optimizer = Discards(learning_rate=0.0)
        variables = [keras.Variable(value.read_value()) for value in values]
        optimizer.build(variables)

    def replica() -> Any:
        gradients = [value.read_value() for value in values]
        if pack_bytes:
            sums = sums_in_packs(gradients, pack_bytes)
            return tf.add_n([total[0] for total in sums])
        optimizer.apply(gradients, variables)
        return optimizer.iterations.value

    @tf.function
    def step() -> Any:
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


def all_reduce_variants(strategies: dict[str, Any], setup: dict[str, Any]) -> dict:
    """Sums of gradients of the same sizes, variant by variant."""
    import tensorflow as tf

    values = [tf.Variable(tf.ones([length])) for length in setup["lengths"]]
    return {
        name: timed(
            gradients_step(strategy, values, pack_bytes_of(setup, name)),
            barrier(strategy),
        )
        for name, strategy in strategies.items()
    }


def step_variants(strategies: dict[str, Any], setup: dict[str, Any]) -> dict:
    """Training steps of a GradientTape loop, and one that does not communicate."""
    model, size = MODELS[setup["model"]], setup["batch_size"]
    variants = {
        name: timed(
            training_step(
                strategy,
                model,
                batch_size=size,
                pack_bytes=pack_bytes_of(setup, name),
            ),
            barrier(strategy),
        )
        for name, strategy in strategies.items()
    }
    if setup["strategy"] == "tfdp":
        first = next(iter(strategies.values()))
        alone = training_step(None, model, batch_size=size)
        variants["no communication"] = timed(alone, barrier(first))
    return variants


def make_variants(setup: dict[str, Any]) -> Variants:
    strategies = make_strategies(setup)
    variants = {"all_reduce": all_reduce_variants, "step": step_variants}
    return variants[setup["benchmark"]](strategies, setup)


if __name__ == "__main__":
    work(make_variants)
