"""What adds to the loss, weighs it, or reduces it in its own way."""

from __future__ import annotations

import keras
import numpy as np

from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as

layers = keras.layers
regularizers = keras.regularizers


@case("Regularizers")
@same_as("unequal_shares_with_masked_mean_accumulated")
def regularizers_of_kernel_and_bias(env: Env) -> dict:
    def build():
        model = common.mlp(
            kernel_regularizer=regularizers.L2(0.1),
            bias_regularizer=regularizers.L1(0.1),
        )
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


@case("Activity regularizers")
@same_as("unequal_shares_with_masked_mean_accumulated")
def activity_regularizer(env: Env) -> dict:
    def build():
        model = common.mlp(activity_regularizer=regularizers.L2(0.1))
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


@case("Constraints", quick_setup="two_by_two")
def constraints(env: Env) -> dict:
    def build():
        model = common.mlp(
            kernel_constraint=keras.constraints.UnitNorm(),
            bias_constraint=keras.constraints.NonNeg(),
        )
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


class Penalty(layers.Layer):
    """Adds the mean square of its input to the loss."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@case("`add_loss`")
def add_loss(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.Dense(4, activation="tanh"),
                Penalty(),
                layers.Dense(1),
            ]
        )
        return common.compiled(model)

    return common.train(env, build, *common.regression_data())


@case('`reduction="sum"`')
@same_as("unequal_shares_with_masked_mean_accumulated")
def reduction_sum(env: Env) -> dict:
    def build():
        loss = keras.losses.MeanSquaredError(reduction="sum")
        return common.compiled(common.mlp(), keras.optimizers.SGD(0.01), loss)

    return common.train(env, build, *common.regression_data())


@case("`sample_weight`")
def sample_weight(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp(), weighted_metrics=["mae"])

    weight = np.linspace(0.0, 2.0, common.NUM_SAMPLES).astype("float32")
    data = *common.regression_data(), weight
    dataset = common.batched(*data)
    return common.train(env, build, dataset)


@case("`class_weight`")
@same_as("sample_weight")
def class_weight(env: Env) -> dict:
    def build():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return common.compiled(common.mlp(outputs=3), loss=loss)

    weight = {0: 0.5, 1: 1.0, 2: 2.0}
    data = common.classification_data()
    return common.train(env, build, *data, class_weight=weight)


@case("Wrong numbers: a loss function that returns a scalar mean")
@same_as("losses_that_couple_rows")
def loss_that_returns_a_scalar(env: Env) -> dict:
    def mean_square(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))

    def build():
        return common.compiled(common.mlp(), loss=mean_square)

    return common.train(env, build, *common.regression_data())


@case("Wrong numbers: `mean_with_sample_weight`")
@same_as("unequal_shares_with_masked_mean_accumulated")
def mean_with_sample_weight(env: Env) -> dict:
    def build():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return common.compiled(common.mlp(), loss=loss)

    weight = np.linspace(0.0, 2.0, common.NUM_SAMPLES).astype("float32")
    return common.train(env, build, common.batched(*common.regression_data(), weight))


@case("Wrong numbers: sequence loss with a mask")
@same_as("unequal_shares_with_masked_mean_accumulated")
def mask_that_reaches_the_loss(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
                layers.Dense(common.NUM_TOKENS),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        return common.compiled(model, loss=loss)

    x = common.tokens()
    return common.train(env, build, x, np.roll(x, -1, axis=1))


@case("Losses that look at the mask but divide by the whole count")
@same_as("unequal_shares_with_masked_mean_accumulated")
def mask_in_a_loss_over_the_batch_size(env: Env) -> dict:
    def build():
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                layers.Embedding(common.NUM_TOKENS, 4, mask_zero=True),
                layers.Dense(common.NUM_TOKENS),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return common.compiled(model, loss=loss)

    # As many masked steps in each half, quarter, ... of a batch: equal shares.
    x = common.tokens()
    x[:, :3] = np.maximum(x[:, :3], 1)
    x[:, 3:] = 0
    return common.train(env, build, x, np.roll(x, -1, axis=1))
