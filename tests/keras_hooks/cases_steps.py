"""How many steps an epoch and an execution have, and how they are counted."""

from __future__ import annotations

import keras

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as


def _train(
    env: Env,
    num_samples: int,
    steps_per_execution: int,
    evaluates: bool = True,
    **options,
) -> dict:
    with env.scope():
        model = common.compiled(
            common.mlp(), steps_per_execution=steps_per_execution, metrics=["mae"]
        )
    x, y = common.regression_data(num_samples)
    history = common.fit(model, x, y, **options)
    results = {"history": history, "weights": env.weights(model)}
    if evaluates:
        results["evaluate"] = model.evaluate(
            x, y, batch_size=8, verbose=0, return_dict=True
        )
    return results | {"predict": model.predict(x, batch_size=8, verbose=0)}


@case("Crash: `steps_per_execution` > 1")
@same_as("three_steps_per_execution_and_a_partial_batch")
def two_steps_per_execution(env: Env) -> dict:
    return _train(env, 32, 2, epochs=2)


@case("Crash: `steps_per_execution` > 1 that does not divide the epoch")
@same_as("three_steps_per_execution_and_a_partial_batch")
def three_steps_per_execution(env: Env) -> dict:
    return _train(env, 32, 3, epochs=2)


@case("Crash: `steps_per_execution` > 1 with a partial batch")
@same_as("three_steps_per_execution_and_a_partial_batch")
def two_steps_per_execution_and_a_partial_batch(env: Env) -> dict:
    return _train(env, 20, 2)


@case("Crash: `steps_per_execution` > 1 with a partial batch that ends an execution")
def three_steps_per_execution_and_a_partial_batch(env: Env) -> dict:
    return _train(env, 20, 3, evaluates=False)


@case("`evaluate` with `steps_per_execution` > 1 and a partial batch")
@same_as("three_steps_per_execution_and_a_partial_batch")
def evaluation_with_three_steps_per_execution(env: Env) -> dict:
    return _train(env, 20, 3)


@case("`steps_per_epoch` over a repeated dataset")
def steps_per_epoch(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp())

    # 4 batches a round, 3 an epoch: each goes on where the last ended.
    dataset = common.batched(*common.regression_data(32)).repeat()
    return common.train(env, build, dataset, steps_per_epoch=3, epochs=3)


@case("`int(optimizer.iterations)` raises under a strategy")
@same_as("generator_loses_no_batch")
def iterations_as_int(env: Env) -> dict:
    model = common.build_in_scope(env, lambda: common.compiled(common.mlp()))
    common.fit(model, *common.regression_data())
    iterations = model.optimizer.iterations
    return {"int": int(iterations), "numpy": iterations.numpy()}


@case("`run_eagerly`")
@same_as("run_eagerly_with_embedding")
def run_eagerly(env: Env) -> dict:
    with env.scope():
        model = common.compiled(common.mlp(), run_eagerly=True, metrics=["mae"])
    history = common.fit(model, *common.regression_data(32))
    return {"history": history, "weights": env.weights(model)}


@case("`run_eagerly` with an Embedding and Adam")
def run_eagerly_with_embedding(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                keras.layers.Embedding(common.NUM_TOKENS, 2),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model, keras.optimizers.Adam(0.01), run_eagerly=True)

    return common.train(env, build, *common.token_data(16))
