"""What must look at the reduced gradient: clipping, and the finite check."""

from __future__ import annotations

import functools

import keras
import numpy as np

from tests.harness import common, registry
from tests.harness.env import Env
from tests.optimizer.cases_optimizers import train_tokens

CLIPS = {"clipnorm": 0.02, "clipvalue": 0.01, "global_clipnorm": 0.05}
# The global norm needs the gradients of all variables, other limits do not.
QUICK = "global_clipnorm_of_dense"
SAME_AS = {
    "clipnorm": "odd_variables_with_lamb_in_stage_2",
    "clipvalue": "adagrad_with_clipvalue_in_float32_and_sharded_optimizer",
}


def _clip_case(name: str, limit: float, tokens: bool) -> None:
    optimizer = functools.partial(keras.optimizers.SGD, 0.5, **{name: limit})

    def function(env: Env) -> dict:
        if tokens:
            return train_tokens(env, optimizer)
        data = common.regression_data()
        build = functools.partial(_clipped_mlp, optimizer)
        return common.train(env, build, *data)

    what = "embedding" if tokens else "dense"
    full_name = f"{name}_of_{what}"
    registry.register(
        full_name,
        function,
        f"Wrong numbers: `{name}` ({what})",
        same_as="" if full_name == QUICK else SAME_AS.get(name, QUICK),
    )


def _clipped_mlp(optimizer) -> keras.Model:
    return common.compiled(common.mlp(), optimizer())


for _name, _limit in CLIPS.items():
    for _tokens in (False, True):
        _clip_case(_name, _limit, _tokens)


def _overflow(env: Env, row: int) -> dict:
    """Trains with one row of the second batch that overflows float32."""
    x, y = common.regression_data()
    x[common.BATCH_SIZE + row] = np.float32(1e30)
    y[common.BATCH_SIZE + row] = np.float32(3e38)
    with env.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=16.0
        )
        model = common.compiled(common.mlp(), optimizer)
    common.fit(model, x, y, epochs=1)
    return {
        "weights": env.weights(model),
        "scale": optimizer.dynamic_scale.numpy(),
        "iterations": optimizer.iterations.numpy(),
        "inner_iterations": optimizer.inner_optimizer.iterations.numpy(),
    }


@registry.case(
    "Hang and wrong numbers: inf on the last replica only, LossScaleOptimizer",
    quick_setup="two_workers",
)
def overflow_on_last_replica_skips_the_step_everywhere(env: Env) -> dict:
    return _overflow(env, common.BATCH_SIZE - 1)


@registry.case(
    "Hang and wrong numbers: inf on the first replica only, LossScaleOptimizer",
)
@registry.same_as("overflow_on_last_replica_skips_the_step_everywhere")
def overflow_on_first_replica_skips_the_step_everywhere(env: Env) -> dict:
    return _overflow(env, 0)
