"""One TensorFlow process of a benchmark: tfdp's strategy or the stock one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.channel import Arm, serve, take_over_output


def make_strategy(setup: dict[str, Any]) -> Any:
    """The strategy of a side, before anything else uses TensorFlow.

    Workers that are `"alone"` have none and know nothing of each other.
    """
    if setup["strategy"] != "alone" and len(setup["addresses"]) > 1:
        task = {"type": "worker", "index": setup["rank"]}
        cluster = {"worker": setup["addresses"]}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    import tensorflow as tf

    import tfdp

    options = tfdp.CommunicationOptions(**setup.get("communication", {}))
    if setup["strategy"] == "auto":
        return tfdp.auto_strategy(communication=options)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if setup["strategy"] == "alone":
        return None
    if setup["strategy"] == "tfdp":
        return tfdp.MultiWorkerMirroredStrategy(communication=options)
    return tf.distribute.MultiWorkerMirroredStrategy()


def timed(function: Callable[[], Any]) -> Arm:
    """Seconds per call; the results are read, so that nothing is left undone.

    The first call is not timed: it waits for the other worker's order to arrive,
    and finds cold what another process has used since.
    """

    def run(steps: int) -> float:
        function().numpy()
        begin = time.perf_counter()
        for _ in range(steps):
            result = function()
        result.numpy()
        return (time.perf_counter() - begin) / steps

    return run


def all_reduce_arms(strategy: Any, setup: dict[str, Any]) -> dict[str, Arm]:
    """Sums of plain tensors, by the public API of tf.distribute."""
    arms = {}
    for name, (lengths, pack_bytes) in setup["arms"].items():
        arms[name] = timed(_all_reduce_step(strategy, lengths, pack_bytes))
    return arms


def _all_reduce_step(
    strategy: Any, lengths: Sequence[int], pack_bytes: int
) -> Callable[[], Any]:
    import tensorflow as tf

    values = [tf.Variable(tf.ones([length])) for length in lengths]
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack_bytes)

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce("SUM", [v.read_value() for v in values], options)
        return tf.add_n([total[0] for total in sums])

    @tf.function
    def step() -> Any:
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


def step_arms(strategy: Any, setup: dict[str, Any]) -> dict[str, Arm]:
    """Training steps of a GradientTape loop, one for each model and pack size."""
    arms = {}
    for model in setup["models"]:
        for pack_bytes in setup["pack_bytes"]:
            name = f"{model}, packs of {pack_bytes}" if pack_bytes else model
            arms[name] = timed(training_step(strategy, model, pack_bytes=pack_bytes))
        if setup["strategy"] != "stock":
            arms[f"{model}, no communication"] = timed(training_step(None, model))
    return arms


def training_step(
    strategy: Any,
    name: str,
    *,
    make_optimizer: Callable[[], Any] | None = None,
    batch_size: int = 32,
    pack_bytes: int = 0,
) -> Callable[[], Any]:
    """A traced step of a GradientTape loop on a fixed batch.

    Args:
        strategy: Strategy or `None`.
        name: String, a model of `tools.bench.models`.
        make_optimizer: Callable that returns a Keras optimizer. Defaults to SGD.
        batch_size: Int, samples of each replica. Defaults to `32`.
        pack_bytes: Int, the stock strategy's pack size. Defaults to its own.

    Returns:
        Callable that takes the step and returns the loss.
    """
    import keras
    import tensorflow as tf

    from tools.bench.models import MODELS

    build, make_batch = MODELS[name]
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        optimizer = make_optimizer() if make_optimizer else keras.optimizers.SGD(1e-3)
        optimizer.build(model.trainable_variables)
    x, y = (tf.constant(array) for array in make_batch(batch_size))
    num_replicas = strategy.num_replicas_in_sync if strategy else 1
    global_batch_size = batch_size * num_replicas

    def replica() -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_sum(losses) / (global_batch_size * losses.shape[-1])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step() -> Any:
        if strategy is None:
            return replica()
        if not hasattr(strategy, "communication_plan"):  # stock
            set_stock_pack_bytes(strategy, pack_bytes)
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


def set_stock_pack_bytes(strategy: Any, pack_bytes: int) -> None:
    """Changes the pack size that the stock strategy traces with.

    Keras's optimizer reduces with the options that the strategy was made with,
    and a process can have one such strategy.
    """
    import tensorflow as tf

    strategy.extended._communication_options = (  # noqa: SLF001
        tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack_bytes)
    )


def main() -> None:
    take_over_output()
    setup = json.loads(sys.argv[1])
    strategy = make_strategy(setup)
    arms = {"all_reduce": all_reduce_arms, "step": step_arms}
    serve(arms[setup["benchmark"]](strategy, setup))


if __name__ == "__main__":
    main()
