"""One TensorFlow process of a benchmark: tfdp's strategy or the stock one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdp.bench.channel import Arm, Arms, work
from tfdp.bench.training import make_strategy, sums_in_packs, timed, training_step
from tools.bench.metered import metered
from tools.bench.models import MODELS


def all_reduce_arms(strategy: Any, setup: dict[str, Any]) -> dict[str, Arm]:
    """Sums of plain tensors, by the public API of tf.distribute."""
    arms = {}
    in_a_row = setup.get("in_a_row", {})
    for name, (lengths, pack_bytes) in setup["arms"].items():
        step = _all_reduce_step(strategy, lengths, pack_bytes, in_a_row.get(name, 1))
        if setup.get("meters"):
            arms[name] = metered(step, lambda result: result.numpy())
        else:
            arms[name] = timed(step)
    return arms


def _all_reduce_step(
    strategy: Any, lengths: Sequence[int], pack_bytes: int, times: int
) -> Callable[[], Any]:
    import tensorflow as tf

    values = [tf.Variable(tf.ones([length])) for length in lengths]

    def replica() -> Any:
        sums = [v.read_value() for v in values]
        for _ in range(times):
            sums = sums_in_packs(sums, pack_bytes)
        return tf.add_n([total[0] for total in sums])

    @tf.function
    def step() -> Any:
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


def step_arms(strategy: Any, setup: dict[str, Any]) -> dict[str, Arm]:
    """Training steps of a GradientTape loop, one for each model and pack size."""
    arms = {}
    for name in setup["models"]:
        model = MODELS[name]
        for pack_bytes in setup["pack_bytes"]:
            arm = f"{name}, packs of {pack_bytes}" if pack_bytes else name
            arms[arm] = timed(training_step(strategy, model, pack_bytes=pack_bytes))
        if setup["strategy"] != "stock":
            arms[f"{name}, no communication"] = timed(training_step(None, model))
    return arms


def make_arms(setup: dict[str, Any]) -> Arms:
    strategy = make_strategy(setup)
    arms = {"all_reduce": all_reduce_arms, "step": step_arms}
    return arms[setup["benchmark"]](strategy, setup)


if __name__ == "__main__":
    work(make_arms)
