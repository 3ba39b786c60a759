"""Training with compressed gradients, and with all that has to do with it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.reduction.cases_selection import SLOW, routed
from tfdp.communication.collectives import timing
from tfdp.compression import BlockQuantized, Compressor, PowerSGD, TopK
from tfdp.training.step.loss_scale import LossScaling

case = registry.case
UNITS = 40
# Of 6 inputs and 40 units: what is compressed by each is more than a bias.
COMPRESSORS: dict[str, Compressor] = {
    "int8": BlockQuantized(),
    "stochastic": BlockQuantized(bits=4, stochastic=True),
    "low_rank": PowerSGD(rank=1, start_step=2),
    "largest": TopK(ratio=0.1),
}
# With which sharding each is tried where all are.
SHARDINGS = {
    "int8": "optimizer",
    "stochastic": "none",
    "low_rank": "none",
    "largest": "gradients",
}


def model_in_scope(env: Env, optimizer: Any = None, **options: Any) -> keras.Model:
    """A perceptron with the same weights whenever it is called."""
    keras.utils.set_random_seed(3)
    with env.scope():
        model = common.mlp(UNITS)
        # Adam would make an update of full size of the smallest difference.
        chosen = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5)
        optimizer = tfdp.DistributedOptimizer(optimizer or chosen, **options)
        return common.compiled(model, optimizer)


def states_of(env: Env, model: keras.Model) -> dict[str, np.ndarray]:
    """All that compressors keep of a model's gradients on this worker."""
    store = env.strategy.extended.reducer.residuals
    return {
        f"{number} {state.level} {name} {replica}": variable.numpy()
        for number, state in enumerate(store.states_within(model.trainable_variables))
        for replica, own in enumerate(state.replicas)
        for name, variable in own.items()
    }


@contextlib.contextmanager
def compressed(env: Env, compressor: Any, **options: Any) -> Iterator[None]:
    """Trains with a compressor; a step that compresses nothing fails the case."""
    with routed(env, compression=compressor, links=SLOW, **options):
        yield


def _register_training(name: str, tolerance: float, compressor: Any, **options: Any):
    def train(env: Env) -> dict:
        with compressed(env, compressor):
            model = model_in_scope(env, **options)
            data = common.regression_data()
            common.fit(model, *data)
            if not env.is_reference:
                assert states_of(env, model)
            loss = model.evaluate(*data, batch_size=common.BATCH_SIZE, verbose=0)
            # Bit for bit the same on all workers, and close to one device.
            return {"weights": env.weights(model), "loss": loss}

    same_as = "training_with_int8_and_sharded_gradients"
    if name.startswith("low_rank"):
        same_as = "compressed_sums_of_low_rank"
    is_quick = name == "int8_and_sharded_gradients"
    registry.register(
        f"training_with_{name}",
        train,
        f"compression: {name.replace('_', ' ')}",
        tol=tolerance,
        same_as="" if is_quick else same_as,
    )


_register_training("int8", 0.02, "int8")
_register_training("int8_and_accumulation", 0.02, "int8", accumulation_steps=3)
_register_training("int8_and_sharded_optimizer", 0.02, "int8", sharding="optimizer")
_register_training(
    "int8_and_sharded_gradients",
    0.02,
    "int8",
    sharding="gradients",
    accumulation_steps=2,
    loss_scale=64.0,
)
_register_training("int8_and_sharded_parameters", 0.02, "int8", sharding="parameters")
_register_training("low_rank", 0.5, PowerSGD(rank=1, start_step=2))
_register_training(
    "low_rank_and_sharded_parameters",
    0.5,
    PowerSGD(rank=1, start_step=0),
    sharding="parameters",
)


@case("a loss scale does not matter to residuals", compare=False)
@registry.same_as("checkpoint_has_the_residuals_of_int8")
def residuals_are_those_of_gradients_without_a_scale(env: Env) -> dict:
    if env.is_reference:
        return {}
    found = []
    # It doubles every other step, and overflows do not come.
    scaling = LossScaling(initial_scale=4.0, growth_steps=2)
    for loss_scale in (None, scaling):
        with compressed(env, BlockQuantized(block=16)):
            model = model_in_scope(
                env, keras.optimizers.SGD(0.05), loss_scale=loss_scale
            )
            common.fit(model, *common.regression_data())
            found.append(model.get_weights())
    assert model.optimizer.loss_scale > 100
    for plain, scaled in zip(*found, strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=0, atol=1e-6)
    return {}


def skip_a_step(env: Env, name: str, sharding: str) -> dict:
    if env.is_reference:
        return {}
    x, y = common.regression_data(16)
    bad = x[8:].copy(), y[8:].copy()
    # An overflow on the last replica only, in one element of its gradients.
    bad[0][-1], bad[1][-1] = 1e30, 3e38
    with compressed(env, COMPRESSORS[name]):
        model = model_in_scope(env, loss_scale="dynamic", sharding=sharding)
        common.fit(model, x[:8], y[:8])
        before = states_of(env, model), model.get_weights()
        common.fit(model, *bad)
        after = states_of(env, model), model.get_weights()
    assert model.optimizer.skipped_steps == 1
    assert any(np.any(value) for value in before[0].values())
    for key, value in before[0].items():
        np.testing.assert_array_equal(after[0][key], value)
    for old, new in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(new, old)
    return {}


def go_on_from_a_checkpoint(env: Env, name: str, sharding: str) -> dict:
    if env.is_reference:
        return {}
    x, y = common.regression_data(64)
    folder = env.tmp / name
    with compressed(env, COMPRESSORS[name]):
        source = model_in_scope(env, sharding=sharding)
        common.fit(source, x[:32], y[:32])
        tfdp.checkpoint.save(source, folder)
        common.fit(source, x[32:], y[32:])
        target = model_in_scope(env, sharding=sharding)
        # Before a step is traced, and after it.
        for _ in range(2):
            tfdp.checkpoint.restore(target, folder)
            common.fit(target, x[32:], y[32:])
            pairs = zip(source.get_weights(), target.get_weights(), strict=True)
            for wanted, found in pairs:
                np.testing.assert_array_equal(found, wanted)
    return {}


def _of(function: Any, name: str, sharding: str) -> registry.Function:
    return lambda env: function(env, name, sharding)


def _register_state(name: str, sharding: str) -> None:
    for function, title in (
        (skip_a_step, "skipped_step_leaves_alone_the_residuals"),
        (go_on_from_a_checkpoint, "checkpoint_has_the_residuals"),
    ):
        registry.register(
            f"{title}_of_{name}",
            _of(function, name, sharding),
            f"{title.replace('_', ' ')} of {name}",
            same_as="" if name == "int8" else f"{title}_of_int8",
            compare=False,
        )


for _name, _sharding in SHARDINGS.items():
    _register_state(_name, _sharding)


@case(
    "eager steps of sharded state, compressed",
    setups=("two_workers",),
    compare=False,
)
def eager_steps_of_sharded_state_are_compressed_as_others_are(env: Env) -> dict:
    if env.is_reference:
        return {}
    gradient = np.random.default_rng(0).normal(size=512).astype("float32")
    found = {}
    for name, sharding in (("none", "none"), ("int8", "none"), ("int8", "optimizer")):
        with compressed(env, None if name == "none" else name):
            with env.scope():
                variable = keras.Variable(tf.zeros(512))
                optimizer = keras.optimizers.SGD(1.0)
                optimizer = tfdp.DistributedOptimizer(optimizer, sharding=sharding)
                optimizer.build([variable])
            step = functools.partial(optimizer.apply, [gradient], [variable])
            env.strategy.run(step)
        found[name, sharding] = variable.numpy()
    rounded = found["int8", "none"]
    assert not np.array_equal(rounded, found["none", "none"])
    np.testing.assert_array_equal(found["int8", "optimizer"], rounded)
    return {}


INT8 = tfdp.CommunicationOptions(compression="int8", links=SLOW)


def _model_on(num_replicas: int, communication: Any) -> keras.Model:
    devices = [f"CPU:{index}" for index in range(num_replicas)]
    strategy = tfdp.MirroredStrategy(devices, communication=communication)
    with strategy.scope():
        return common.compiled(common.mlp(UNITS), keras.optimizers.Adam(0.01))


def _save_trained(env: Env, num_replicas: int) -> None:
    source = _model_on(num_replicas, INT8)
    common.fit(source, *common.regression_data(32))
    tfdp.checkpoint.save(source, env.tmp / "directory")


def _restore_and_drop(env: Env, target: keras.Model, reason: str) -> None:
    with pytest.warns(UserWarning, match="are dropped") as caught:
        tfdp.checkpoint.restore(target, env.tmp / "directory")
    (text,) = {str(w.message) for w in caught if "dropped" in str(w.message)}
    assert text.endswith(f"begin at zero: {reason}.")


@case("residuals of fewer replicas", setups=("eight_devices",), compare=False)
@registry.same_as("checkpoint_has_the_residuals_of_int8")
def residuals_of_other_replicas_are_dropped_with_one_sentence(env: Env) -> dict:
    _save_trained(env, 2)
    reason = "they were saved by 2 replicas, and this run has 4"
    _restore_and_drop(env, _model_on(4, INT8), reason)
    return {}


@case(
    "residuals of other replicas, and of another compressor",
    setups=("eight_devices",),
    compare=False,
)
@registry.same_as("checkpoint_has_the_residuals_of_int8")
def training_goes_on_where_residuals_are_dropped(env: Env) -> dict:
    x, y = common.regression_data(32)
    _save_trained(env, 4)
    cases = (
        (2, INT8, "they were saved by 4 replicas, and this run has 2"),
        (4, None, "gradients are not compressed now"),
    )
    for num_replicas, communication, reason in cases:
        target = _model_on(num_replicas, communication)
        _restore_and_drop(env, target, reason)
        common.fit(target, x, y)
    other = tfdp.CommunicationOptions(compression=BlockQuantized(bits=4), links=SLOW)
    target = _model_on(4, other)
    tfdp.checkpoint.restore(target, env.tmp / "directory")
    with pytest.warns(UserWarning, match="to other buckets or another compressor"):
        common.fit(target, x, y)
    return {}


def _sent_bytes(env: Env, compressor: Any) -> tuple[float, float, Any]:
    """Bytes of a traced step's gradients: sent, as planned, and the plan."""
    with compressed(env, compressor):
        with env.scope():
            model = keras.Sequential(
                [keras.Input((64,)), keras.layers.Dense(1024), keras.layers.Dense(64)]
            )
            common.compiled(model)
        x = common.features(8).repeat(11, axis=1)[:, :64]
        with timing.Recorder() as recorder:
            common.fit(model, x, x)
        plan = env.strategy.communication_plan(model)
    sent = sum(
        item.wire_bytes
        for item in recorder.collectives
        if item.is_of_gradients and item.replica == 0
    )
    return sent, plan.wire_bytes, plan


@case("bytes of compressed gradients", compare=False)
@registry.same_as("compressed_sums_of_4_bits_in_levels")
def compressed_gradients_send_as_many_bytes_as_planned(env: Env) -> dict:
    if env.is_reference:
        return {}
    plain, _, _ = _sent_bytes(env, None)
    for compressor, most, name in (
        ("int8", 0.27, "int8"),
        (BlockQuantized(bits=4), 0.14, "int4"),
        (PowerSGD(rank=4, start_step=0), 0.15, "PowerSGD of rank 4"),
        (TopK(ratio=0.01), 0.05, "top 1 %"),
    ):
        sent, planned, plan = _sent_bytes(env, compressor)
        assert sent <= most * plain, name
        assert planned == pytest.approx(sent, rel=0.02), name
        assert name in str(plan)
    return {}


@case("a bucket that gains nothing", compare=False)
@registry.same_as("compression_is_off_where_it_would_not_gain")
def compressor_is_off_where_it_would_not_gain(env: Env) -> dict:
    if env.is_reference:
        return {}
    fast = tfdp.options.Links(tfdp.options.Link(1.0, 0.0), tfdp.options.Link(1.0, 0.0))
    # With a ratio above 1 / replicas an all-gather moves more than an all-reduce.
    for compressor, links in (("int8", fast), (TopK(ratio=0.6), SLOW)):
        with routed(env, compression=compressor, links=links):
            model = model_in_scope(env)
            common.fit(model, *common.regression_data(8))
            assert states_of(env, model) == {}
    return {}


@case("Momentum of a compressor", compare=False)
def momentum_correction_has_all_buckets_or_says_so(env: Env) -> dict:
    if env.is_reference:
        return {}
    corrected = TopK(ratio=0.6, momentum=0.9)
    with routed(env, compression=corrected, links=SLOW):
        model = model_in_scope(env)
        begun, trained = model.get_weights(), []
        # A new optimizer begins without the momentum, and without what was not sent.
        for _ in range(2):
            with env.scope():
                common.compiled(model, keras.optimizers.SGD(0.05))
            model.set_weights(begun)
            common.fit(model, *common.regression_data(8))
            trained.append(model.get_weights())
        for own, other in zip(*trained, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-7)
        # Also a bucket that gains nothing.
        assert any("momentum" in name for name in states_of(env, model))
    options = tfdp.CommunicationOptions(compression=corrected)
    with tfdp.MirroredStrategy(["CPU:0"], communication=options).scope():
        model = common.compiled(common.mlp(UNITS))
    with pytest.warns(UserWarning, match="with one replica nothing is compressed"):
        common.fit(model, *common.regression_data(8))
    return {}


@case("Momentum of a compressor beside sparse gradients", compare=False)
@registry.same_as("momentum_correction_has_all_buckets_or_says_so")
def momentum_correction_leaves_rows_out_and_says_so(env: Env) -> dict:
    if env.is_reference:
        return {}
    corrected = TopK(ratio=0.6, momentum=0.9)
    with routed(env, compression=corrected, links=SLOW):
        with env.scope():
            table = keras.layers.Embedding(common.NUM_TOKENS, 4)
            parts = [table, keras.layers.Flatten(), keras.layers.Dense(1)]
            model = common.compiled(keras.Sequential(parts))
        with pytest.warns(UserWarning, match="rows of sparse gradients are not"):
            common.fit(model, *common.token_data(8))
    return {}


class WrongShape(Compressor):
    def reduce(self, bucket, state, group):
        return group.all_reduce(bucket.flat)[:-1], state


class WrongState(Compressor):
    def reduce(self, bucket, state, group):
        return group.all_reduce(bucket.flat), {"more": bucket.flat}


class NoPair(Compressor):
    def reduce(self, bucket, state, group):
        return group.all_reduce(bucket.flat)


SENTENCES = {
    WrongShape: r"`WrongShape.reduce` must return a sum of shape \(\d+,\)",
    WrongState: "`WrongState` returned must have the names that `state` gave",
    NoPair: "`NoPair.reduce` must return a tensor and a dict",
}


@case("a compressor that returns a wrong sum", compare=False)
def wrong_sums_of_a_compressor_are_told_on_every_worker(env: Env) -> dict:
    return _told_of_wrong_results(env, WrongShape)


@case("compressors that return no state, or another one", compare=False)
@registry.same_as("wrong_sums_of_a_compressor_are_told_on_every_worker")
def wrong_states_of_a_compressor_are_told_on_every_worker(env: Env) -> dict:
    return _told_of_wrong_results(env, WrongState, NoPair)


def _told_of_wrong_results(env: Env, *kinds: type[Compressor]) -> dict:
    if env.is_reference:
        return {}
    for kind in kinds:
        with compressed(env, kind()):
            model = model_in_scope(env)
            with pytest.raises(ValueError, match=SENTENCES[kind]):
                common.fit(model, *common.regression_data(8))
    return {}


@case("sparse gradients beside compressed ones", tol=0.02)
@registry.same_as("checkpoint_has_the_residuals_of_int8")
def sparse_gradients_are_left_alone(env: Env) -> dict:
    def build() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((common.LENGTH,), dtype="int32"),
                keras.layers.Embedding(common.NUM_TOKENS, 16),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(UNITS),
                keras.layers.Dense(1),
            ]
        )
        return common.compiled(model)

    with compressed(env, "int8"):
        model = common.build_in_scope(env, build)
        history = common.fit(model, *common.token_data())
        if not env.is_reference:
            assert states_of(env, model)
            plan = env.strategy.communication_plan(model)
            assert plan.sparse == (model.trainable_variables[0].path,)
    return {"history": history, "weights": env.weights(model)}


@case("random rounding is right on average", compare=False)
@registry.same_as("checkpoint_has_the_residuals_of_int8")
def random_rounding_is_right_on_average(env: Env) -> dict:
    if env.is_reference:
        return {}
    value = np.linspace(-1, 1, 64, dtype="float32")
    with compressed(env, BlockQuantized(bits=4, block=64, stochastic=True)):
        with env.scope():
            variable = keras.Variable(tf.zeros([64]))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        @tf.function
        def step() -> None:
            env.strategy.run(lambda: optimizer.apply([tf.constant(value)], [variable]))

        for _ in range(400):
            step()
    mean = -variable.numpy() / (400 * env.num_replicas)
    # A step of 4 bits is 1 / 7; its mean over 400 steps is within a few percent of it.
    np.testing.assert_allclose(mean, value, atol=0.02)
    assert np.unique(np.round(mean, 6)).size > 32
    return {}
