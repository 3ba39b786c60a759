"""`DistributedOptimizer` and its callbacks: each case against plain Keras or NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tests.harness.tiers import full
from tfdp.ground._compat import keras_optimizer, optimizer_state, optimizer_views
from tfdp.ground.base import param_groups
from tfdp.training.reduction.fusion import ReducedGradients, unbucketed
from tfdp.training.step import grouped_update
from tfdp.training.step.flat_params import FlatParameter
from tfdp.training.step.loss_scale import LossScaling

CASE_MODULES = ("optimizer.cases_custom_loops", "optimizer.cases_lifecycle")
optimizers = keras.optimizers
ELEMENTWISE = sorted(param_groups._ELEMENTWISE, key=lambda kind: kind.__name__)
# They have the most different slots: one, three, and one with another role.
QUICK_KINDS = ("SGD", "Adam", "Ftrl")


def test_optimizer(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


# Without a cluster: what one device can tell.


class Own(optimizers.Optimizer):
    """A user's optimizer."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)


class OwnAdam(optimizers.Adam):
    """A user's subclass, which may do anything."""


def variables(dtype: str = "float32") -> list[keras.Variable]:
    rng = np.random.default_rng(2)
    shapes = [(3, 4), (4,), (), (2, 3, 2), (5,)]
    return [
        keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"v{index}")
        for index, shape in enumerate(shapes)
    ]


def gradients(like: list[keras.Variable], seed: int) -> list[tf.Tensor]:
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=v.shape), v.dtype) for v in like]


def built(optimizer: optimizers.Optimizer, chosen: list) -> optimizers.Optimizer:
    optimizer.build(chosen)
    return optimizer


# Groups of the fused update.


def test_small_variables_of_one_dtype_are_updated_together():
    single, double = variables(), variables("float64")
    chosen = [single[0], double[0], single[1], double[1], single[2]]
    optimizer = built(optimizers.Adam(), chosen)
    groups = grouped_update.plan_groups(optimizer, gradients(chosen, 0), chosen)
    assert groups == [[0, 2, 4], [1, 3]]


def test_variables_excluded_from_weight_decay_are_a_group_of_their_own():
    chosen = variables()
    optimizer = optimizers.AdamW(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["v1", "v4"])
    built(optimizer, chosen)
    groups = grouped_update.plan_groups(optimizer, gradients(chosen, 0), chosen)
    assert groups == [[0, 2, 3], [1, 4]]


def test_large_and_sparse_and_single_variables_are_updated_one_by_one():
    chosen = variables()
    most = grouped_update.LARGEST_ELEMENTS
    chosen.append(keras.Variable(np.zeros([2, most // 2], "float32")))
    chosen.append(keras.Variable(np.zeros([most + 1], "float32")))
    chosen.append(keras.Variable(np.zeros([3], "float64")))
    given = gradients(chosen, 0)
    given[0] = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([1]), tf.constant([3, 4]))
    optimizer = built(optimizers.SGD(momentum=0.9), chosen)
    assert grouped_update.plan_groups(optimizer, given, chosen) == [[1, 2, 3, 4, 5]]


def test_plain_sgd_has_one_kernel_for_each_variable_and_needs_no_groups():
    chosen = variables()
    optimizer = built(optimizers.SGD(), chosen)
    assert grouped_update.plan_groups(optimizer, gradients(chosen, 0), chosen) == []


def test_groups_are_small_enough_for_the_cache(monkeypatch):
    monkeypatch.setattr(grouped_update, "LARGEST_GROUP", 12)
    chosen = [keras.Variable(np.zeros([n], "float32")) for n in (5, 7, 1, 12, 4, 4)]
    optimizer = built(optimizers.SGD(momentum=0.9), chosen)
    groups = grouped_update.plan_groups(optimizer, gradients(chosen, 0), chosen)
    assert groups == [[0, 1], [4, 5]]


def test_number_of_updates_is_read_once_for_all_variables():
    def num_reads(count: int) -> int:
        chosen = [keras.Variable(np.ones([5000], "float32")) for _ in range(count)]
        optimizer = tfdp.DistributedOptimizer(optimizers.Adam())
        optimizer.build(chosen)

        @tf.function(autograph=False)
        def update():
            optimizer.apply([tf.ones(v.shape) for v in chosen], chosen)

        found = update.get_concrete_function().graph.get_operations()
        reads = [op for op in found if op.type == "ReadVariableOp"]
        return sum(op.outputs[0].dtype.is_integer for op in reads)

    assert 0 < num_reads(1) == num_reads(4)


def test_groups_hold_no_more_than_their_room():
    size, most = grouped_update.LARGEST_ELEMENTS, grouped_update.LARGEST_GROUP
    chosen = [
        keras.Variable(np.zeros([size], "float32")) for _ in range(2 * most // size + 2)
    ]
    given = [tf.zeros([size])] * len(chosen)
    groups = grouped_update.plan_groups(
        built(optimizers.SGD(momentum=0.9), chosen), given, chosen
    )
    assert [index for group in groups for index in group] == list(range(len(chosen)))
    assert all(1 < len(group) <= most // size for group in groups)


@pytest.mark.parametrize(
    "kind", [optimizers.Lamb, optimizers.Adafactor, Own, OwnAdam, tfdp.optimizers.LARS]
)
def test_what_is_not_known_to_be_elementwise_is_never_grouped(kind):
    chosen = variables()
    optimizer = built(kind(0.1), chosen)
    assert not param_groups.is_elementwise(optimizer)
    assert grouped_update.plan_groups(optimizer, gradients(chosen, 0), chosen) == []


OPTIONS = {"Adam": {"amsgrad": True}, "RMSprop": {"centered": True, "momentum": 0.9}}
OPTIONS["SGD"] = {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    "kind",
    [kind if kind.__name__ in QUICK_KINDS else full(kind) for kind in ELEMENTWISE],
    ids=lambda kind: kind.__name__,
)
def test_fused_update_is_keras_own(kind):
    options = {"weight_decay": 0.1, "learning_rate": 0.05, "use_ema": True}
    options |= OPTIONS.get(kind.__name__, {})
    results = []
    for wraps in False, True:
        chosen = variables()
        optimizer = kind(**options)
        optimizer.exclude_from_weight_decay(var_names=["v1"])
        outer = tfdp.DistributedOptimizer(optimizer) if wraps else optimizer
        outer.build(chosen)
        for step in range(3):
            outer.apply(gradients(chosen, step), chosen)
        results.append([v.numpy() for v in [*chosen, *optimizer.variables]])
    for plain, fused in zip(*results, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=1e-6, atol=1e-7)


def test_fused_update_of_many_variables_takes_one_root():
    chosen = [keras.Variable(np.ones([3], "float32")) for _ in range(8)]
    counts = {}
    for wraps in False, True:
        optimizer = optimizers.Adam()
        optimizer = tfdp.DistributedOptimizer(optimizer) if wraps else optimizer
        optimizer.build(chosen)

        @tf.function(autograph=False)
        def update(optimizer=optimizer):
            optimizer.apply([tf.ones([3])] * 8, chosen)

        nodes = update.get_concrete_function().graph.as_graph_def().node
        counts[wraps] = sum(node.op == "Sqrt" for node in nodes)
    # One more for the correction of the bias, for each call.
    assert counts[False] - 8 >= counts[True] - 1
    assert counts[True] <= 2


# Several variables as one.


def test_flat_view_is_read_changed_and_written_back_as_one():
    parts = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable(5.0)]
    view = FlatParameter(parts)
    assert view.shape == [5]
    np.testing.assert_array_equal(view * 2 + 1, [3, 5, 7, 9, 11])
    np.testing.assert_array_equal(1 / view, 1 / np.arange(1, 6, dtype="float32"))
    np.testing.assert_array_equal(tf.square(view), [1, 4, 9, 16, 25])
    view.assign_sub(tf.ones([5]))
    view.assign_add(2 * view.value)
    assert parts[1].numpy() == 5, "written back too soon"
    view.write_back()
    np.testing.assert_array_equal(parts[0], [[0, 3], [6, 9]])
    assert parts[1].numpy() == 12


def test_flat_view_that_was_never_read_is_changed_in_place():
    parts = [tf.Variable([[1.0, 2.0], [3.0, 4.0]]), tf.Variable(5.0)]
    view = FlatParameter(parts)
    view.assign_sub(tf.ones([5]))
    assert parts[1].numpy() == 5, "written back too soon"
    view.write_back()
    np.testing.assert_array_equal(parts[0], [[0, 1], [2, 3]])
    assert parts[1].numpy() == 4
    view = FlatParameter(parts)
    view.assign_sub(tf.ones([5]))
    np.testing.assert_array_equal(view.read_value(), [-1, 0, 1, 2, 3])
    view.assign_sub(tf.ones([5]))
    view.write_back()
    np.testing.assert_array_equal(parts[0], [[-2, -1], [0, 1]])
    view = FlatParameter(parts)
    view.assign_sub(tf.ones([5]))
    view.assign(tf.range(5.0))
    view.write_back()
    np.testing.assert_array_equal(parts[0], [[0, 1], [2, 3]])


def test_flat_view_that_was_not_changed_writes_nothing():
    part = tf.Variable([1.0, 2.0])
    view = FlatParameter([part])
    assert view.value is not None
    part.assign([7.0, 8.0])
    view.write_back()
    np.testing.assert_array_equal(part, [7, 8])


# Gradients in their buckets.


def reduced() -> ReducedGradients:
    rows = tf.IndexedSlices(tf.constant([[2.0, 4.0]]), [1], tf.constant([3, 2]))
    like = [tf.zeros([2]), rows, tf.zeros([2, 1]), tf.zeros([])]
    flats = [tf.constant([1.0, 2.0, 3.0]), tf.constant([4.0, 5.0])]
    return ReducedGradients(flats, [(3, 0), (2,)], like, {1: rows})


def test_reduced_gradients_come_back_in_order_and_shape():
    first, rows, second, scalar = reduced().divided_by(tf.constant(2.0)).gradients()
    np.testing.assert_array_equal(first, [1, 1.5])
    np.testing.assert_array_equal(second, [[2], [2.5]])
    np.testing.assert_array_equal(scalar, 0.5)
    np.testing.assert_array_equal(tf.convert_to_tensor(rows), [[0, 0], [1, 2], [0, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_reduced_gradients_are_finite_only_if_all_are(bad):
    assert reduced().all_finite()
    dense, sparse = reduced(), reduced()
    dense.flats[1] = tf.constant([4.0, bad])
    assert not dense.all_finite()
    rows = tf.IndexedSlices(tf.constant([[2.0, bad]]), [1], [3, 2])
    sparse.sparse[1] = rows
    assert not sparse.all_finite()


def test_gradients_of_one_device_are_left_as_they_are():
    given = reduced().like
    result = unbucketed(given).gradients()
    for gradient, original in zip(result, given, strict=True):
        assert isinstance(gradient, type(original))
        gradient, original = map(tf.convert_to_tensor, (gradient, original))
        np.testing.assert_array_equal(gradient, original, strict=True)


# Configuration.


def wrapped(**options) -> tfdp.DistributedOptimizer:
    inner = optimizers.AdamW(0.01, clipnorm=1.0, use_ema=True, ema_momentum=0.7)
    return tfdp.DistributedOptimizer(inner, name="wrapper", **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 4},
        {"loss_scale": 8.0},
        {"loss_scale": LossScaling(initial_scale=4.0, growth_steps=3, min_scale=2.0)},
        {"accumulation_steps": 2, "loss_scale": "dynamic"},
    ],
)
def test_config_makes_an_optimizer_alike(options):
    optimizer = wrapped(**options)
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert isinstance(again, tfdp.DistributedOptimizer)
    assert again.get_config() == optimizer.get_config()
    assert again.accumulation_steps == options.get("accumulation_steps", 1)
    assert again.features.scaling == optimizer.features.scaling
    assert again.inner_optimizer.get_config() == optimizer.inner_optimizer.get_config()


def test_config_of_a_built_optimizer_with_a_schedule_makes_one_alike():
    schedule = optimizers.schedules.CosineDecay(0.1, 100)
    optimizer = tfdp.DistributedOptimizer(
        optimizers.SGD(schedule), loss_scale="dynamic"
    )
    optimizer.build(variables())
    again = tfdp.DistributedOptimizer.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("by_updates", [True, False])
def test_a_schedule_counts_in_a_file_what_it_has_counted(by_updates):
    """Updates, or the micro-batches of an optimizer that accumulated them itself."""
    schedule = optimizers.schedules.PolynomialDecay(1.0, 100, 0.0)
    inner = {} if by_updates else {"gradient_accumulation_steps": 4}
    outer = {"accumulation_steps": 4} if by_updates else {}
    optimizer = tfdp.DistributedOptimizer(optimizers.SGD(schedule, **inner), **outer)
    for _ in range(2):
        config = keras.saving.serialize_keras_object(optimizer.as_keras())
        saved = keras.saving.deserialize_keras_object(config)
        assert type(saved.get_config()["learning_rate"]) is dict
        assert "tfdp" not in str(config)
        optimizer = tfdp.DistributedOptimizer(saved)
        optimizer.build(variables())
        optimizer.inner_optimizer.iterations.assign(3)
        expected = 0.97 if by_updates else 0.88
        assert float(optimizer.learning_rate) == pytest.approx(expected)


def test_the_scale_of_a_wrapped_scaling_optimizer_is_read_as_before():
    scaling = optimizers.LossScaleOptimizer(optimizers.SGD(), initial_scale=8.0)
    optimizer = tfdp.DistributedOptimizer(scaling)
    optimizer.build(variables())
    assert float(optimizer.dynamic_scale.numpy()) == 8.0
    assert not hasattr(tfdp.DistributedOptimizer(optimizers.SGD()), "dynamic_scale")


class Halving(optimizers.schedules.LearningRateSchedule):
    """A user's schedule without a config, which Keras cannot serialize."""

    def __call__(self, step):
        return 0.1 * 0.5 ** tf.cast(step, tf.float32)


def test_clones_of_an_optimizer_share_a_schedule_without_config():
    schedule = Halving()
    adam = optimizers.Adam(schedule)
    clones = [
        optimizer_views.plain_clone(adam),
        optimizer_state.built_without_memory(adam, [keras.Variable([1.0])]),
        tfdp.DistributedOptimizer(adam).renew().inner_optimizer,
    ]
    assert all(keras_optimizer.rate_or_schedule(c) is schedule for c in clones)


def test_wrapper_shows_itself_as_the_wrapped_optimizer():
    optimizer = wrapped()
    optimizer.learning_rate = 0.25
    assert optimizer.inner_optimizer.learning_rate.numpy() == 0.25
    assert optimizer.iterations is optimizer.inner_optimizer.iterations
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (None, 0)
    assert optimizer.accumulated_steps == 0


def test_options_of_the_wrapped_optimizer_are_shown_and_set():
    optimizer = wrapped()
    assert (optimizer.clipnorm, optimizer.use_ema, optimizer.ema_momentum) == (
        1,
        1,
        0.7,
    )
    optimizer.weight_decay = 0.3
    assert optimizer.inner_optimizer.weight_decay == 0.3
    assert optimizer.gradient_accumulation_steps is None
    optimizer.gradient_accumulation_steps = 3
    assert optimizer.accumulation_steps == optimizer.gradient_accumulation_steps == 3


def test_settings_of_the_wrapped_class_are_shown_and_act():
    inner = optimizers.SGD(0.5, momentum=0.9)
    optimizer = tfdp.DistributedOptimizer(inner)
    assert optimizer.momentum == 0.9
    optimizer.momentum = 0.5
    assert inner.momentum == 0.5
    np.testing.assert_allclose(one_by_one(optimizer, [1.0, 1.0])[0], -0.25)
    optimizer.note = "of the user"
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'beta_1'"):
        optimizer.beta_1  # noqa: B018


def one_by_one(optimizer, scales=(1.0,)) -> list[np.ndarray]:
    """Applies gradients of one each, scaled, to ones; returns what they become."""
    chosen = [keras.Variable(np.ones(2, "float32")) for _ in range(2)]
    for scale in scales:
        if isinstance(scale, LossScaling):
            optimizer.features.set_scaling(scale)
        else:
            optimizer.apply([tf.fill([2], scale)] * 2, chosen)
    optimizer.flush()
    return [v.numpy() for v in chosen]


def test_flush_makes_an_update_of_what_waits_and_of_nothing_else():
    optimizer = tfdp.DistributedOptimizer(optimizers.SGD(0.5), accumulation_steps=4)
    np.testing.assert_array_equal(
        one_by_one(optimizer, [1.0, 2.0, 3.0]), 0 * np.ones([2, 2])
    )
    assert (int(optimizer.iterations), optimizer.accumulated_steps) == (1, 0)
    optimizer.flush()
    assert int(optimizer.iterations) == 1


def test_loss_scale_that_is_changed_within_a_window_scales_what_waits():
    scales = [LossScaling(initial_scale=value) for value in (16.0, 4.0)]
    optimizer = tfdp.DistributedOptimizer(
        optimizers.SGD(0.5), accumulation_steps=2, loss_scale=scales[0]
    )
    results = one_by_one(optimizer, [16.0, scales[1], 4.0])
    np.testing.assert_array_equal(results, np.full([2, 2], 0.5))


def test_optimizer_that_was_built_goes_on_where_it_stands():
    """Wrapped between two micro-batches, it makes the update that was due."""
    results = []
    for wraps_at in None, 3:
        chosen = variables()
        optimizer = optimizers.Adam(0.1, gradient_accumulation_steps=2)
        optimizer.build(chosen)
        for step in range(6):
            if step == wraps_at:
                optimizer = tfdp.DistributedOptimizer(optimizer)
                assert optimizer.accumulated_steps == 1
            optimizer.apply(gradients(chosen, step), chosen)
        assert int(optimizer.iterations) == 3
        results.append([v.numpy() for v in chosen])
    for plain, taken_over in zip(*results, strict=True):
        np.testing.assert_allclose(taken_over, plain, rtol=1e-6)


# One device.


def test_callbacks_do_the_same_on_one_device():
    """Against plain Keras: warmup to a factor of one is no warmup."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 3)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    callbacks = [
        tfdp.callbacks.GradientAccumulation(2),
        tfdp.callbacks.LossScaling(16.0, growth_steps=2),
        tfdp.callbacks.LearningRateWarmup(steps=4, initial_factor=1.0),
    ]
    results = []
    for steps, chosen in (2, []), (None, callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        options = {"gradient_accumulation_steps": steps, "global_clipnorm": 0.1}
        model.compile(optimizers.SGD(0.1, momentum=0.9, **options), "mse")
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, callbacks=chosen, **options).history
        results.append([*model.get_weights(), history["loss"]])
    assert history["skipped_steps"] == [0]
    assert history["loss_scale"] == [32.0]
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5)


def test_plan_whose_first_epoch_accumulates_nothing_accumulates_later():
    """Keras builds the optimizer inside the first step, which later epochs run, too."""
    x = np.ones((12, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizers.SGD(0.01), "mse")
    plan = tfdp.callbacks.GradientAccumulation({1: 3})
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    model.fit(x, x[:, :1], callbacks=[plan], **options)
    assert int(model.optimizer.iterations) == 3 + 1
