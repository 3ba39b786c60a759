"""LARS against NumPy in float64, written from the paper's algorithm 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.harness.tiers import full
from tfdp.optimizers import LARS

NUM_UPDATES = 12
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
# Name, shape, whether it has a trust ratio and decay unless the user says else.
VARIABLES = [
    ("kernel", (5, 4), True),
    ("convolution", (3, 3, 2, 4), True),
    ("embeddings", (7, 3), True),
    ("zeros", (3, 3), True),
    ("still", (2, 3), True),
    ("bias", (4,), False),
    ("gamma", (4,), False),
    ("beta", (2, 3), False),
    ("scalar", (), False),
]
NAMES = [name for name, _, _ in VARIABLES]
PLAIN = {name for name, _, is_adapted in VARIABLES if not is_adapted}
Arrays = dict[str, np.ndarray]


class PaperLARS:
    """What the paper says, for one variable at a time, in float64."""

    def __init__(
        self, rate, momentum=0.9, eta=0.001, beta=0.0005, nesterov=False, epsilon=0.0
    ):
        self.rate, self.momentum, self.eta, self.beta = rate, momentum, eta, beta
        self.nesterov, self.epsilon = nesterov, epsilon
        self.velocity: Arrays = {}
        self.not_adapted, self.not_decayed = set(PLAIN), set(PLAIN)

    def update(self, weights: Arrays, gradients: Arrays) -> None:
        for name in weights:
            w, g = weights[name], gradients[name].astype("float64")
            beta = 0.0 if name in self.not_decayed else self.beta
            w_norm, g_norm = np.linalg.norm(w.ravel()), np.linalg.norm(g.ravel())
            local_rate = 1.0
            if name not in self.not_adapted and w_norm > 0 and g_norm > 0:
                local_rate = self.eta * w_norm / (g_norm + beta * w_norm + self.epsilon)
            term = self.rate * local_rate * (g + beta * w)
            v = self.momentum * self.velocity.get(name, 0.0) + term
            self.velocity[name] = v
            weights[name] = w - (self.momentum * v + term if self.nesterov else v)


def initial_weights(dtype: str) -> Arrays:
    rng = np.random.default_rng(1)
    weights = {name: rng.normal(size=shape) for name, shape, _ in VARIABLES}
    weights["zeros"] *= 0
    return {name: np.asarray(w, dtype) for name, w in weights.items()}


def gradients_of_step(step: int, dtype: str) -> Arrays:
    """Gradients of very different sizes, as the paper says that layers have."""
    rng = np.random.default_rng(100 + step)
    gradients = {
        name: rng.normal(size=shape) * 10.0 ** (index % 5 - 2)
        for index, (name, shape, _) in enumerate(VARIABLES)
    }
    gradients["still"] *= 0
    return {name: np.asarray(g, dtype) for name, g in gradients.items()}


def make_variables(weights: Arrays) -> dict[str, keras.Variable]:
    return {
        n: keras.Variable(w, dtype=w.dtype.name, name=n) for n, w in weights.items()
    }


def error_of(actual: Any, expected: np.ndarray) -> float:
    difference = np.max(np.abs(np.asarray(actual, "float64") - expected))
    return float(difference / max(np.max(np.abs(expected)), 1e-3))


def assert_close(variables: dict, expected: Arrays, dtype: str) -> None:
    errors = {n: error_of(v.numpy(), expected[n]) for n, v in variables.items()}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def run_both(
    optimizer: Any,
    reference: PaperLARS,
    dtype: str,
    prepare: Callable[[Arrays], Arrays] = lambda gradients: gradients,
) -> tuple[dict[str, keras.Variable], Arrays]:
    """12 updates on each side; `prepare` is what Keras does to the gradients."""
    start = initial_weights(dtype)
    variables = make_variables(start)
    expected = {name: w.astype("float64") for name, w in start.items()}
    for step in range(NUM_UPDATES):
        gradients = gradients_of_step(step, dtype)
        optimizer.apply(
            [tf.constant(gradients[name]) for name in NAMES], [*variables.values()]
        )
        reference.update(
            expected, prepare({n: g.astype("float64") for n, g in gradients.items()})
        )
    return variables, expected


def keras_rate(rate: float) -> float:
    """Keras holds the learning rate in float32."""
    return float(np.float32(rate))


SETTINGS: dict[str, tuple[dict, dict]] = {
    "defaults": ({}, {}),
    "momentum_0": ({"momentum": 0.0}, {"momentum": 0.0}),
    "momentum_0_without_decay": (
        {"momentum": 0, "weight_decay": None},
        {"momentum": 0.0, "beta": 0.0},
    ),
    "decay_0": ({"weight_decay": 0}, {"beta": 0.0}),
    "large_decay": (
        {"weight_decay": 0.3, "trust_coefficient": 0.02},
        {"beta": 0.3, "eta": 0.02},
    ),
    "nesterov": (
        {"nesterov": True, "momentum": 0.7, "weight_decay": 0.1},
        {"nesterov": True, "momentum": 0.7, "beta": 0.1},
    ),
    "epsilon": ({"epsilon": 0.5}, {"epsilon": 0.5}),
}


# In float64 an error of the formula cannot hide in the tolerance.
QUICK = [
    ("defaults", "float32"),
    ("momentum_0_without_decay", "float64"),
    ("large_decay", "float64"),
    ("nesterov", "float64"),
    ("epsilon", "float64"),
]


@pytest.mark.parametrize(
    ("setting", "dtype"),
    [
        each if each in QUICK else full(*each)
        for each in itertools.product(SETTINGS, TOLERANCE)
    ],
)
def test_twelve_updates_are_those_of_the_paper(setting: str, dtype: str):
    ours, papers = SETTINGS[setting]
    optimizer = LARS(0.7, **ours)
    reference = PaperLARS(keras_rate(0.7), **papers)
    variables, expected = run_both(optimizer, reference, dtype)
    assert_close(variables, expected, dtype)
    if papers.get("momentum") == 0:
        assert optimizer.momentums == []
    else:
        velocities = dict(zip(NAMES, optimizer.momentums, strict=True))
        assert_close(velocities, reference.velocity, dtype)


@pytest.mark.parametrize("names", [full(["convolution"]), ["embed", "^ker"]])
def test_variables_excluded_by_name_keep_their_decay_but_lose_the_trust_ratio(names):
    optimizer = LARS(0.01, weight_decay=0.2)
    optimizer.exclude_from_layer_adaptation(var_names=names)
    reference = PaperLARS(keras_rate(0.01), beta=0.2)
    reference.not_adapted |= (
        {"convolution"} if len(names) == 1 else {"embeddings", "kernel"}
    )
    assert_close(*run_both(optimizer, reference, "float64"), "float64")


def test_variables_excluded_from_decay_keep_a_trust_ratio_without_it():
    optimizer = LARS(0.5, weight_decay=0.2)
    optimizer.exclude_from_weight_decay(var_names=["kernel", "convolution"])
    reference = PaperLARS(0.5, beta=0.2)
    reference.not_decayed |= {"kernel", "convolution"}
    assert_close(*run_both(optimizer, reference, "float64"), "float64")


def test_variables_are_excluded_by_identity_too():
    excluded = keras.Variable([[3.0, 4.0]], name="kernel")
    other = keras.Variable([[3.0, 4.0]], name="kernel")
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.5, weight_decay=None)
    optimizer.exclude_from_layer_adaptation(var_list=[excluded])
    optimizer.apply([tf.constant([[1.0, 0.0]])] * 2, [excluded, other])
    assert excluded.numpy().tolist() == [[2.0, 4.0]]
    assert other.numpy().tolist() == [[0.5, 4.0]]


def test_a_second_call_of_an_exclusion_replaces_the_first():
    optimizer = LARS(0.5)
    optimizer.exclude_from_layer_adaptation(var_names=["kernel"])
    optimizer.exclude_from_layer_adaptation()
    assert_close(*run_both(optimizer, PaperLARS(0.5), "float64"), "float64")


def test_every_variable_is_adapted_where_the_user_says_so():
    optimizer = LARS(0.5, exclude_biases_and_norms=False)
    reference = PaperLARS(0.5)
    reference.not_adapted = reference.not_decayed = set()
    assert_close(*run_both(optimizer, reference, "float64"), "float64")


def test_weight_decay_is_applied_once():
    kernel = keras.Variable([[3.0, 4.0]])
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.25, weight_decay=0.5)
    optimizer.apply([tf.constant([[0.0, 2.5]])], [kernel])
    # norm(w) = 5, norm(g) + 0.5 norm(w) = 5, so that the trust ratio is 0.25.
    assert kernel.numpy().tolist() == [[3 - 0.25 * 1.5, 4 - 0.25 * 4.5]]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_with_rows_that_occur_twice_are_those_of_dense_ones(momentum):
    rng = np.random.default_rng(3)
    start = {"embeddings": rng.normal(size=(7, 3))}
    sparse, dense = make_variables(start), make_variables(start)
    optimizers = [LARS(0.7, momentum, weight_decay=0.1) for _ in range(2)]
    reference = PaperLARS(keras_rate(0.7), momentum, beta=0.1)
    expected = dict(start)
    for _ in range(NUM_UPDATES):
        indices, values = rng.integers(0, 5, 8), rng.normal(size=(8, 3))
        table = np.zeros((7, 3))
        np.add.at(table, indices, values)
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(indices))
        optimizers[0].apply([slices], [*sparse.values()])
        optimizers[1].apply([tf.constant(table)], [*dense.values()])
        reference.update(expected, {"embeddings": table})
    assert_close(sparse, expected, "float64")
    assert_close(dense, expected, "float64")


def test_gradients_of_an_embedding_are_sparse_and_train_it():
    layer = keras.layers.Embedding(5, 2, embeddings_initializer="ones")
    layer.build()
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.1, weight_decay=None)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 1, 1, 3])))
    gradients = tape.gradient(loss, layer.trainable_variables)
    assert isinstance(gradients[0], tf.IndexedSlices)
    optimizer.apply(gradients, layer.trainable_variables)
    # Rows 1 and 3 have the gradients 3 and 1 in each of their two columns.
    step = np.array([0, 3, 0, 1, 0])[:, None] * 0.1 * np.sqrt(10 / 20)
    expected = {"embeddings": np.ones((5, 2)) - step}
    assert_close({"embeddings": layer.embeddings}, expected, "float32")


def by_norm(gradients: Arrays) -> Arrays:
    norms = {n: np.linalg.norm(g.ravel()) for n, g in gradients.items()}
    return {n: g * min(1.0, 0.3 / max(norms[n], 1e-9)) for n, g in gradients.items()}


def by_global_norm(gradients: Arrays) -> Arrays:
    norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
    return {n: g * min(1.0, 0.3 / norm) for n, g in gradients.items()}


def by_value(gradients: Arrays) -> Arrays:
    return {n: np.clip(g, -0.3, 0.3) for n, g in gradients.items()}


@pytest.mark.parametrize(
    ("kwargs", "prepare"),
    [
        full({"clipnorm": 0.3}, by_norm),
        ({"global_clipnorm": 0.3}, by_global_norm),
        full({"clipvalue": 0.3}, by_value),
        (
            {"loss_scale_factor": 8.0},
            lambda gradients: {n: g / 8 for n, g in gradients.items()},
        ),
    ],
    ids=["clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"],
)
def test_gradients_are_clipped_and_unscaled_before_their_norm_is_taken(kwargs, prepare):
    optimizer, reference = LARS(0.5, **kwargs), PaperLARS(0.5)
    assert_close(*run_both(optimizer, reference, "float64", prepare), "float64")


def test_accumulated_gradients_are_averaged_before_their_norm_is_taken():
    start = initial_weights("float64")
    variables, expected = make_variables(start), dict(start)
    optimizer = LARS(0.5, gradient_accumulation_steps=3)
    reference = PaperLARS(0.5)
    for update in range(4):
        steps = [gradients_of_step(3 * update + i, "float64") for i in range(3)]
        for gradients in steps:
            optimizer.apply(
                [tf.constant(gradients[n]) for n in NAMES], [*variables.values()]
            )
        reference.update(expected, {n: sum(g[n] for g in steps) / 3 for n in NAMES})
    assert_close(variables, expected, "float64")


def test_moving_average_of_the_weights_is_kept_and_put_in_place_at_the_end():
    optimizer, reference = LARS(0.5, use_ema=True, ema_momentum=0.5), PaperLARS(0.5)
    start = initial_weights("float64")
    variables, expected = make_variables(start), dict(start)
    average: Arrays = {}
    for step in range(NUM_UPDATES):
        gradients = gradients_of_step(step, "float64")
        optimizer.apply(
            [tf.constant(gradients[n]) for n in NAMES], [*variables.values()]
        )
        reference.update(expected, gradients)
        average = {n: (average.get(n, expected[n]) + expected[n]) / 2 for n in NAMES}
    assert_close(variables, expected, "float64")
    optimizer.finalize_variable_values([*variables.values()])
    assert_close(variables, average, "float64")


def test_schedule_sets_the_rate_of_each_step_and_the_velocity_remembers_it():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [1.0, 0.125])
    optimizer, reference = LARS(schedule), PaperLARS(1.0)

    def next_rate(gradients: Arrays) -> Arrays:
        next_rate.step += 1
        reference.rate = 1.0 if next_rate.step <= 5 else 0.125
        return gradients

    next_rate.step = 0
    assert_close(*run_both(optimizer, reference, "float64", next_rate), "float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_beyond_half_precision_do_not_overflow(dtype: str):
    kernel = keras.Variable(np.full((100, 100), 8.0), dtype=dtype)
    optimizer = LARS(1.0, momentum=0.0, trust_coefficient=0.25, weight_decay=None)
    optimizer.apply([tf.fill([100, 100], tf.cast(1024.0, dtype))], [kernel])
    assert np.all(np.asarray(kernel.numpy(), "float32") == 6.0)


def test_mixed_precision_with_a_scaled_loss_takes_the_step_of_float32():
    dense = keras.layers.Dense(3, kernel_initializer="ones", dtype="mixed_float16")
    dense.build((None, 2))
    inner = LARS(1.0, momentum=0.0, trust_coefficient=0.5, weight_decay=None)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**10)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(dense(tf.ones([4, 2])), tf.float32))
        loss = optimizer.scale_loss(loss)
    variables = dense.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)
    # All six weights and their gradients are alike: half of each weight goes.
    assert_close({"kernel": dense.kernel}, {"kernel": np.full((2, 3), 0.5)}, "float32")
    assert_close({"bias": dense.bias}, {"bias": np.full(3, -4.0)}, "float32")


def test_updates_inside_a_strategy_and_a_function_are_the_same():
    start = initial_weights("float64")
    expected = dict(start)
    reference = PaperLARS(0.5, beta=0.2)
    reference.not_adapted |= {"kernel"}
    reference.not_decayed |= {"convolution"}
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        variables = make_variables(start)
        optimizer = LARS(0.5, weight_decay=0.2)
        optimizer.exclude_from_layer_adaptation(var_names=["kernel"])
        optimizer.exclude_from_weight_decay(var_list=[variables["convolution"]])
        optimizer.build([*variables.values()])

    def replica_step(gradients):
        optimizer.apply([tf.identity(gradients[name]) for name in NAMES])

    @tf.function
    def step(gradients):
        strategy.run(replica_step, (gradients,))

    for number in range(NUM_UPDATES):
        gradients = gradients_of_step(number, "float64")
        step({name: tf.constant(g) for name, g in gradients.items()})
        reference.update(expected, gradients)
    assert_close(variables, expected, "float64")


ALL_ARGUMENTS = {
    "name": "mine",
    "learning_rate": 0.25,
    "momentum": 0.5,
    "trust_coefficient": 0.02,
    "weight_decay": 0.125,
    "nesterov": True,
    "epsilon": 0.5,
    "exclude_biases_and_norms": False,
    "clipnorm": 1.0,
    "clipvalue": None,
    "global_clipnorm": None,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 3,
    "loss_scale_factor": 4.0,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("arguments", [{}, ALL_ARGUMENTS], ids=["defaults", "all"])
def test_config_makes_the_same_optimizer_again(arguments: dict):
    optimizer = LARS(**arguments)
    config = optimizer.get_config()
    assert set(config) == set(ALL_ARGUMENTS)
    assert config.items() >= arguments.items()
    assert LARS.from_config(dict(config)).get_config() == config
    serialized = keras.optimizers.serialize(optimizer)
    assert serialized["registered_name"] == "tfdp>LARS"
    again = keras.optimizers.deserialize(serialized)
    assert type(again) is LARS
    assert again.get_config() == config


def test_config_keeps_a_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.25)
    again = LARS.from_config(LARS(schedule).get_config())
    assert (
        again.get_config()["learning_rate"]
        == LARS(schedule).get_config()["learning_rate"]
    )


def test_saved_model_goes_on_where_it_stopped(tmp_path):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(LARS(0.5, momentum=0.5, weight_decay=0.25), "mse")
    gradients = [tf.ones([3, 2]), tf.ones([2])]
    model.optimizer.apply(gradients, model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    for each in (model, loaded):
        each.optimizer.apply(gradients, each.trainable_variables)
    for owner in (lambda m: m, lambda m: m.optimizer):
        ours, theirs = owner(model).variables, owner(loaded).variables
        for left, right in zip(ours, theirs, strict=True):
            assert np.array_equal(left.numpy(), right.numpy()), left.path


BAD_NUMBERS = [float("nan"), float("inf"), -0.5, True, "0.9", [0.9]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", value) for value in [*BAD_NUMBERS, 1.5, None]]
    + [("trust_coefficient", value) for value in [*BAD_NUMBERS, 0.0, None]]
    + [("weight_decay", value) for value in BAD_NUMBERS]
    + [("epsilon", value) for value in [*BAD_NUMBERS, None]],
)
def test_number_out_of_range_is_refused(name: str, value: object):
    with pytest.raises(ValueError, match=f"`{name}` must be a number") as caught:
        LARS(**{name: value})
    assert str(caught.value).endswith(f"Received: {name}={value!r}")


def test_unknown_argument_is_refused():
    with pytest.raises(ValueError, match="not recognized"):
        LARS(trust=0.001)


def test_nesterov_without_momentum_warns():
    with pytest.warns(UserWarning, match="`nesterov=True` changes nothing"):
        LARS(momentum=0.0, nesterov=True)


def test_one_string_for_a_list_of_names_is_refused():
    with pytest.raises(ValueError, match="Received: var_names='kernel'"):
        LARS().exclude_from_layer_adaptation(var_names="kernel")


def test_exclusion_after_the_first_step_is_refused():
    optimizer = LARS()
    optimizer.build([keras.Variable([[1.0]])])
    with pytest.raises(ValueError, match="before the optimizer is built"):
        optimizer.exclude_from_layer_adaptation(var_names=["kernel"])
