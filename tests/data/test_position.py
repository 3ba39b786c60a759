"""Where a run stands in its data is restored, or it is said why not."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.callbacks import BackupAndRestore
from tfdp.ground._compat import random_seeds
from tfdp.training.data import epochs

pytestmark = pytest.mark.slow

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 20, 4, 3
STEPS = NUM_SAMPLES // BATCH_SIZE
X = np.random.default_rng(0).normal(size=(NUM_SAMPLES, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class PowerCut(Exception):
    """Stands for a process that is killed."""


class Cut(keras.callbacks.Callback):
    """Ends training at the end of a step, and notes the batches that it saw."""

    def __init__(self, step: int | None = None) -> None:
        super().__init__()
        self.step = step
        self.seen: list[tuple[int, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.seen) == self.step:
            raise PowerCut


@pytest.fixture(autouse=True)
def _no_global_seed():
    before = random_seeds.tensorflow_random_state()
    random_seeds.set_tensorflow_random_state(
        {"seed": None, "rng": None, "generator": None}
    )
    yield
    random_seeds.set_tensorflow_random_state(before)


def build(steps_per_execution: int = 1) -> keras.Model:
    keras.backend.clear_session()
    first = keras.initializers.RandomNormal(seed=1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, "tanh", kernel_initializer=first),
            keras.layers.Dense(1, kernel_initializer=first),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.05),
        "mse",
        metrics=["mae"],
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    return model


def renewed(steps_per_execution: int = 1) -> keras.Model:
    """The model of `build` as it began, of which the step is traced already."""
    model, beginning = _traced_once(steps_per_execution)
    for variable, value in zip(_state_of(model), beginning, strict=True):
        variable.assign(value)
    model.reset_metrics()
    return model


@functools.cache
def _traced_once(steps_per_execution: int) -> tuple[keras.Model, list[np.ndarray]]:
    model = build(steps_per_execution)
    model.optimizer.build(model.trainable_variables)
    return model, [variable.numpy() for variable in _state_of(model)]


def _state_of(model: keras.Model) -> list[Any]:
    return [*model.weights, *model.optimizer.variables]


def fit(
    data: dict[str, Any],
    *callbacks: Any,
    make_model: Callable[[int], keras.Model] = renewed,
    **options: Any,
) -> tuple:
    """Weights and history of a training that a script would do."""
    options = {"epochs": EPOCHS, "verbose": 0} | options | data
    model = make_model(options.pop("steps_per_execution", 1))
    history = model.fit(callbacks=list(callbacks), **options)
    return model.get_weights(), history.history, history.epoch


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def arrays(**options: Any) -> dict[str, Any]:
    return {"x": X, "y": Y, "batch_size": BATCH_SIZE} | options


def seeded_arrays() -> dict[str, Any]:
    tf.random.set_seed(3)
    return arrays()


def filtered() -> tf.data.Dataset:
    return rows().shuffle(20, seed=4).filter(lambda x, y: x[0] > -9.0).batch(4)


def concatenated() -> tf.data.Dataset:
    first = rows().take(8).shuffle(8, seed=1)
    return first.concatenate(rows().skip(8).shuffle(12, seed=2)).batch(4)


def mapped() -> tf.data.Dataset:
    def noisy(x: Any, y: Any) -> tuple:
        return x + tf.random.normal(tf.shape(x), seed=2), y

    return rows().shuffle(20, seed=1).batch(4).map(noisy)


def split_after_shuffling() -> dict[str, Any]:
    """Both parts share a shuffle, whose seeds their iterators draw by turns."""
    both = rows().shuffle(20, seed=3)
    return {"x": both.skip(4).batch(4), "validation_data": both.take(4).batch(2)}


def validated_by_repeated_rows() -> dict[str, Any]:
    # All of them: how far TensorFlow reads beyond `validation_steps` differs.
    twice = rows().shuffle(20, seed=3).repeat(2).batch(6)
    return {**arrays(shuffle=False), "validation_data": twice}


REPEATABLE: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: arrays(shuffle=False),
    "arrays shuffled with a seed": seeded_arrays,
    "arrays with steps per epoch": lambda: arrays(shuffle=False, steps_per_epoch=3),
    "shuffled": lambda: {"x": rows().shuffle(20, seed=3).batch(4)},
    "small buffer": lambda: {"x": rows().shuffle(3, seed=3).batch(4).prefetch(2)},
    "always alike": lambda: {
        "x": rows().shuffle(9, seed=3, reshuffle_each_iteration=False).batch(4)
    },
    "repeated": lambda: {
        "x": rows().shuffle(20, seed=3).repeat(2).batch(4),
    },
    "endless": lambda: {
        "x": rows().shuffle(20, seed=3).repeat().batch(4),
        "steps_per_epoch": 3,
    },
    "part of an epoch": lambda: {
        "x": rows().shuffle(20, seed=3).batch(4),
        "steps_per_epoch": STEPS,
    },
    "of unknown length": lambda: {"x": filtered()},
    "concatenated": lambda: {"x": concatenated()},
    "cached": lambda: {"x": rows().shuffle(20, seed=1).cache().batch(4)},
    "two steps at a time": lambda: {
        "x": rows().shuffle(20, seed=3).batch(4),
        "steps_per_execution": 2,
    },
    "split after shuffling": split_after_shuffling,
    "validated by repeated rows": validated_by_repeated_rows,
    "from a later epoch on": lambda: {
        "x": rows().shuffle(20, seed=3).batch(4),
        "initial_epoch": 1,
    },
}


# Each goes another way through the code; the others run in the full tier.
TOLD_APART = (
    *("repeated", "endless", "of unknown length", "two steps at a time"),
    *("split after shuffling", "validated by repeated rows"),
)


@pytest.mark.parametrize("name", TOLD_APART)
def test_a_run_goes_on_with_the_batch_that_comes_next(name, tmp_path):
    check_that_it_goes_on(name, 2, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("save_freq", [1, 2, "epoch"])
@pytest.mark.parametrize("name", REPEATABLE)
def test_any_data_with_seeds_goes_on_however_often_it_is_saved(
    name, save_freq, tmp_path
):
    check_that_it_goes_on(name, save_freq, tmp_path, make_model=build)


def check_that_it_goes_on(
    name: str, save_freq: Any, tmp_path: Path, **options: Any
) -> None:
    make = REPEATABLE[name]
    undisturbed = fit(make(), Cut())
    steps = {"two steps at a time": 5, "repeated": 12}.get(name, 7)
    with pytest.raises(PowerCut):
        fit(make(), BackupAndRestore(tmp_path / "b", save_freq), Cut(steps))
    watch = Cut()
    found = fit(make(), BackupAndRestore(tmp_path / "b", save_freq), watch, **options)
    assert_same(found, undisturbed)
    assert watch.seen[0] != (0, 0), "it began from the start"


def assert_same(found: tuple, wanted: tuple) -> None:
    for value, other in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(value, other)
    assert found[1:] == wanted[1:]


@pytest.mark.full
def test_a_run_that_is_cut_at_each_of_its_steps_goes_on(tmp_path):
    make = REPEATABLE["shuffled"]
    undisturbed = fit(make(), Cut())
    backup = tmp_path / "b"
    for _ in range((EPOCHS * STEPS - 1) // 3):
        with pytest.raises(PowerCut):
            fit(make(), BackupAndRestore(backup, 1), Cut(4))
    assert_same(fit(make(), BackupAndRestore(backup, 1), Cut()), undisturbed)


def test_batches_are_numbered_on(tmp_path):
    make = REPEATABLE["shuffled"]
    with pytest.raises(PowerCut):
        fit(make(), BackupAndRestore(tmp_path / "b", 3), Cut(STEPS + 4))
    watch = Cut()
    fit(make(), BackupAndRestore(tmp_path / "b", 3), watch, epochs=2)
    assert watch.seen == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_an_epoch_whose_last_batch_was_saved_ends_with_its_logs(tmp_path):
    make = REPEATABLE["shuffled"]
    undisturbed = fit(make(), Cut())
    # The power is cut after the backup at the last batch of the second epoch.
    cut = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: epoch == 1 and cut_now()
    )
    with pytest.raises(PowerCut):
        fit(make(), BackupAndRestore(tmp_path / "b", STEPS), cut)
    watch = Cut()
    found = fit(make(), BackupAndRestore(tmp_path / "b", STEPS), watch)
    assert watch.seen[0] == (2, 0)
    assert_same(found, undisturbed)


def cut_now() -> None:
    raise PowerCut


def test_arrays_without_a_seed_go_on_in_the_order_that_they_had(tmp_path, monkeypatch):
    seeds = iter([77, 77, 99])
    monkeypatch.setattr(epochs, "new_seed", lambda: next(seeds))
    undisturbed = fit(arrays(), BackupAndRestore(tmp_path / "a", 2), Cut())
    with pytest.raises(PowerCut):
        fit(arrays(), BackupAndRestore(tmp_path / "b", 2), Cut(7))
    found = fit(arrays(), BackupAndRestore(tmp_path / "b", 2), Cut())
    assert_same(found, undisturbed)


def endless() -> Any:
    for index in itertools.count():
        start = BATCH_SIZE * (index % STEPS)
        yield X[start : start + BATCH_SIZE], Y[start : start + BATCH_SIZE]


def of_generator() -> tf.data.Dataset:
    spec = (tf.TensorSpec([None, 3]), tf.TensorSpec([None, 1]))
    dataset = tf.data.Dataset.from_generator(endless, output_signature=spec)
    return dataset.take(STEPS)


def unseeded_noise() -> tf.data.Dataset:
    return rows().batch(4).map(lambda x, y: (x + tf.random.normal(tf.shape(x)), y))


def by_numpy() -> tf.data.Dataset:
    def same(x: Any, y: Any) -> tuple:
        double = tf.numpy_function(lambda value: value, [x], tf.float32)
        return tf.ensure_shape(double, [None, 3]), y

    return rows().batch(4).map(same)


class Batches(keras.utils.PyDataset):
    """Batches by number."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple:
        start = BATCH_SIZE * index
        return X[start : start + BATCH_SIZE], Y[start : start + BATCH_SIZE]


class Reshuffled(Batches):
    """Batches that change after each epoch."""

    def on_epoch_end(self) -> None:
        pass


def noise_of_a_layer() -> tf.data.Dataset:
    noise = keras.layers.GaussianNoise(0.1, seed=1)
    return rows().batch(4).map(lambda x, y: (noise(x, training=True), y))


UNREPEATABLE: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shuffled": (lambda: {"x": rows().shuffle(20).batch(4)}, "has no seed"),
    "generator": (
        lambda: {"x": endless(), "steps_per_epoch": STEPS},
        "a Python generator restarts at its beginning",
    ),
    "from_generator": (lambda: {"x": of_generator()}, "a Python generator or function"),
    "numpy_function": (lambda: {"x": by_numpy()}, "a Python generator or function"),
    "noise": (lambda: {"x": unseeded_noise()}, "RandomStandardNormal"),
    "noise of a layer": (
        lambda: {"x": noise_of_a_layer()},
        "a function in the dataset changes a variable",
    ),
    "mixed at random": (
        lambda: {"x": tf.data.Dataset.sample_from_datasets([rows(), rows()]).batch(8)},
        "a RandomDataset has no seed",
    ),
    "in any order": (
        lambda: {
            "x": rows()
            .batch(4)
            .map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)
        },
        "`deterministic=False`",
    ),
    "PyDataset": (lambda: {"x": Batches()}, "a `PyDataset` is shuffled"),
    "PyDataset that changes": (
        lambda: {"x": Reshuffled(), "shuffle": False},
        "a `PyDataset` changes in `on_epoch_end`",
    ),
}


@pytest.mark.parametrize(
    "name", ["shuffled", "generator", "PyDataset", "noise of a layer"]
)
def test_data_that_cannot_be_repeated_is_named_and_its_epoch_begins_again(
    name, tmp_path
):
    check_that_its_epoch_begins_again(name, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", UNREPEATABLE)
def test_any_data_that_cannot_be_repeated_is_named(name, tmp_path):
    check_that_its_epoch_begins_again(name, tmp_path)


def check_that_its_epoch_begins_again(name: str, tmp_path: Path) -> None:
    make, reason = UNREPEATABLE[name]
    with pytest.raises(PowerCut), pytest.warns(UserWarning, match=reason) as found:
        fit(make(), BackupAndRestore(tmp_path / "b", 1), Cut(STEPS + 3))
    assert len([w for w in found if "The position in the data" in str(w.message)]) == 1
    watch = Cut()
    with pytest.warns(UserWarning, match=reason) as found:
        fit(make(), BackupAndRestore(tmp_path / "b", 1), watch, epochs=2)
    assert len([w for w in found if "The position in the data" in str(w.message)]) == 1
    # Data that does not tell its length is asked once more.
    assert watch.seen[:STEPS] == [(1, step) for step in range(STEPS)]


@pytest.mark.full
def test_a_py_dataset_in_order_goes_on_within_its_epoch(tmp_path):
    data = {"shuffle": False}
    undisturbed = fit({"x": Batches(), **data}, Cut())
    with pytest.raises(PowerCut):
        fit({"x": Batches(), **data}, BackupAndRestore(tmp_path / "b", 1), Cut(7))
    watch = Cut()
    found = fit({"x": Batches(), **data}, BackupAndRestore(tmp_path / "b", 1), watch)
    assert watch.seen[0] == (1, 1)
    assert_same(found, undisturbed)


def test_nobody_is_warned_of_data_that_is_saved_between_epochs_only(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The position in the data")
        fit({"x": rows().shuffle(20).batch(4)}, BackupAndRestore(tmp_path / "b"))


def test_data_of_another_length_begins_its_epoch_again(tmp_path):
    with pytest.raises(PowerCut):
        fit({"x": rows().batch(4)}, BackupAndRestore(tmp_path / "b", 1), Cut(STEPS + 2))
    watch = Cut()
    shorter = {"x": rows().take(16).batch(4)}
    with pytest.warns(UserWarning, match="the number of batches was 5 and is 4"):
        fit(shorter, BackupAndRestore(tmp_path / "b", 1), watch, epochs=2)
    assert watch.seen == [(1, step) for step in range(4)]


def test_the_order_of_a_dataset_that_depends_on_a_seed_nobody_set_is_named():
    from tfdp.training.data.determinism import nondeterminism_of

    tf.random.set_seed(123)
    dataset = rows().shuffle(20, seed=1).batch(4)
    assert nondeterminism_of(dataset, is_ordered=True) is None
    assert "was not set" in nondeterminism_of(
        dataset, is_ordered=True, stand_in_seed=123
    )
