"""Data of which each worker reads its own rows only: the results of one device."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import tempfile
import typing
import warnings

import h5py
import keras
import numpy as np
import tensorflow as tf

from tests.data.cases_balance import Shift, rebalanced
from tests.harness import common
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tfdp.ground import user_code
from tfdp.training.data.own_rows import StoredRows
from tfdp.training.data.rows import rows_of_worker

BATCH = common.BATCH_SIZE
# Three full batches and one of five rows, which four replicas share as two, one, one
# and one.
NUM_ROWS = 3 * BATCH + 5


class Rows(keras.utils.PyDataset):
    """Batches of arrays, of which some rows can be read.

    Keeps what was asked for: the batch, and the rows of it.
    """

    def __init__(self, *arrays: np.ndarray, **options: typing.Any) -> None:
        super().__init__(**options)
        self.arrays = arrays
        self.shift = 0
        self.read: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // BATCH)

    def num_rows(self, index: int) -> int:
        return min(BATCH, len(self.arrays[0]) - index * BATCH)

    def rows(self, index: int, start: int, stop: int) -> tuple:
        self.read.append((index, start, stop))
        first = index * BATCH
        rows = tuple(a[first + start : first + stop] for a in self.arrays)
        return (rows[0] + np.float32(self.shift), *rows[1:])

    def __getitem__(self, index: int) -> tuple:
        return self.rows(index, 0, self.num_rows(index))


class Changing(Rows):
    """The same, with other batches after each epoch."""

    def on_epoch_end(self) -> None:
        self.shift += 1


def build() -> keras.Model:
    return common.compiled(common.mlp(), metrics=["mae"])


def assert_own_rows(env: Env, data: Rows) -> None:
    """Assert that this worker has asked for its rows of each batch, and no other."""
    workers = range(env.setup.num_workers) if env.setup.is_multi_worker else [0]
    if env.is_reference or len(workers) == 1:
        return
    num_local = env.num_replicas // len(workers)
    ranks = range(env.rank * num_local, (env.rank + 1) * num_local)
    assert data.read
    for index, start, stop in data.read:
        own = rows_of_worker(data.num_rows(index), ranks, env.num_replicas)
        assert range(start, stop) == own, (index, start, stop)


@case(
    "A `PyDataset` that gives rows: all workers read all (fit, evaluate, predict)",
    quick_setup="two_workers",
)
@same_as("py_dataset")
def py_dataset_of_rows(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    data, weighted = Rows(x, y), Rows(x, y, np.linspace(0, 2, NUM_ROWS, dtype="f4"))
    model = common.build_in_scope(env, build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {
            "history": common.fit(model, data, epochs=2, validation_data=Rows(x, y)),
            "weighted": common.fit(model, weighted),
            "evaluate": model.evaluate(data, verbose=0, return_dict=True),
            "predict": model.predict(Rows(x), verbose=0),
            "weights": env.weights(model),
        }
    assert_own_rows(env, data)
    assert_own_rows(env, weighted)
    return found


@case(
    "The same, shuffled: workers draw other orders; `on_epoch_end`, `steps_per_epoch`",
)
@same_as("py_dataset")
def shuffled_py_dataset_of_rows(env: Env) -> dict:
    keras.utils.set_random_seed(7)
    data = Rows(*common.regression_data(NUM_ROWS))
    found = common.train(env, build, data, shuffle=True, epochs=2)
    assert_own_rows(env, data)
    # An epoch of two of the four batches: the third begins where the second ended.
    data = Rows(*common.regression_data(NUM_ROWS))
    steps = common.train(env, build, data, steps_per_epoch=2, epochs=2)
    assert_own_rows(env, data)
    data = Changing(*common.regression_data(NUM_ROWS))
    changing = common.train(env, build, data, epochs=3)
    assert data.shift >= 3
    return {"shuffled": found, "steps": steps, "changing": changing}


@case("The same, by threads; weights of classes")
@same_as("py_dataset")
def py_dataset_of_rows_by_threads(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    y = (y > 0).astype("float32")
    weight = {0: 1.0, 1: 3.0}
    data = Rows(x, y, workers=2)
    found = common.train(env, build, data, class_weight=weight, epochs=2)
    assert_own_rows(env, data)
    return found


class Miscounted(Rows):
    """Counts no rows."""

    def num_rows(self, index: int) -> float:
        return BATCH / 2


def sentence_of(env: Env, data: typing.Any, **options: typing.Any) -> str:
    model = common.build_in_scope(env, build)
    try:
        common.fit(model, data, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error was raised")


@case(
    "`PyDataset`s of rows that differ between workers: a hang",
    compare=False,
    setups=("two_workers", "two_by_two"),  # in one process there is nothing to compare
)
def different_py_datasets_of_rows(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    own = NUM_ROWS - env.rank
    told = sentence_of(env, Rows(x[:own], y[:own]))
    assert "Workers have different PyDatasets" in told, told
    assert "29 on worker 0, 28 on worker 1" in told, told
    data = Rows(x.astype("float64") if env.rank else x, y)
    told = sentence_of(env, data)
    assert "batch/[0]/dtype: 'float32' on worker 0, 'float64'" in told, told
    told = sentence_of(env, Miscounted(x, y) if env.rank else Rows(x, y))
    assert told.startswith("Worker 1 cannot read its rows: `num_rows`"), told
    assert "Received: num_rows(0)=4.0" in told, told
    return {}


def _prepared(*arrays: np.ndarray) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    return dataset.map(lambda x, *rest: (2 * x, *rest))


@case("Datasets with `map`: every worker prepares all rows")
@same_as("py_dataset")
def datasets_with_map(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    weight = np.linspace(0, 2, NUM_ROWS, dtype="float32")
    assert NUM_ROWS % BATCH  # the last batch is a partial one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # An epoch ends within a pass, and the next one goes on there.
        endless = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(NUM_ROWS, seed=3)
        endless = endless.repeat().map(lambda x, y: (2 * x, y)).batch(BATCH)
        found = {
            "steps": common.train(env, build, endless, steps_per_epoch=3, epochs=2),
            "weighted": common.train(env, build, _prepared(x, y, weight).batch(BATCH)),
            "whole": common.train(
                env, build, _prepared(x, y).batch(BATCH, drop_remainder=True), epochs=2
            ),
            "classes": common.train(
                env,
                build,
                _prepared(x, (y > 0).astype("float32")).batch(BATCH),
                class_weight={0: 1.0, 1: 3.0},
            ),
        }
        model = common.build_in_scope(env, build)
        data = _prepared(x, y).batch(BATCH)
        found["evaluate"] = model.evaluate(data, verbose=0, return_dict=True)
        found["predict"] = model.predict(data, verbose=0)
    return found


@case(
    "A `filter` after `map`: every worker prepares all rows, and says so once",
    setups=("two_workers", "two_by_two"),
)
@same_as("py_dataset")
def a_late_filter_is_told_once(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    data = _prepared(x, y).filter(lambda x, y: y[0] < 1).batch(BATCH)
    model = common.build_in_scope(env, build)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {f"fit {i}": common.fit(model, data, epochs=2) for i in range(2)}
        found["evaluate"] = model.evaluate(data, verbose=0, return_dict=True)
    told = [str(w.message) for w in caught if "`filter` after `map`" in str(w.message)]
    assert len(told) == (not env.is_reference and env.is_chief), told
    return found | {"weights": env.weights(model)}


@case(
    "`--rebalance` with rows of their own: no word",
    setups=("two_workers", "two_by_two"),
)
@same_as("py_dataset")
def own_rows_with_rebalance(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    data = {"dataset": _prepared(x, y).batch(BATCH), "rows": Rows(x, y)}
    found = {}
    for name, each in data.items():
        with rebalanced(env) as balance, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shift = Shift(balance)
            found[name] = common.train(env, build, each, callbacks=[shift], epochs=2)
        told = [str(w.message) for w in caught if "prepares all rows" in str(w.message)]
        assert len(told) == (not env.is_reference and env.is_chief), (name, told)
        if not env.is_reference:
            user_code.forget_topics()
    return found


@case("Memory maps and HDF5 datasets: every worker copies all of them")
@same_as("py_dataset")
def arrays_in_files(env: Env) -> dict:
    x, y = common.regression_data(NUM_ROWS)
    folder = pathlib.Path(tempfile.mkdtemp())
    np.save(folder / "x.npy", x)
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    seen: list[int] = []
    with h5py.File(folder / "y.h5", "w") as file, _recording(seen):
        kept = file.create_dataset("y", data=y, chunks=(4, 1))
        model = common.build_in_scope(env, build)
        history = [
            common.fit(model, mapped, kept, shuffle=shuffle, epochs=2, **options)
            for shuffle, options in (
                (False, {"validation_data": (mapped, kept)}),
                ("batch", {}),
                (True, {"sample_weight": np.linspace(0, 2, NUM_ROWS)}),
            )
        ]
        split = common.fit(model, mapped, y, validation_split=0.3, shuffle=True)
        _assert_part_is_read(env, seen)
        found = {
            **{f"fit {i}": each for i, each in enumerate(history)},
            "split": split,
            "evaluate": model.evaluate(mapped, kept, verbose=0, return_dict=True),
            "predict": model.predict(mapped, verbose=0, batch_size=BATCH),
            "weights": env.weights(model),
        }
    shutil.rmtree(folder)
    return found


@contextlib.contextmanager
def _recording(seen: list[int]) -> typing.Iterator[None]:
    """Keeps the numbers of the rows that are read from files."""
    original = StoredRows.read

    def read(stored: StoredRows, numbers: np.ndarray) -> np.ndarray:
        seen.append(len(numbers))
        return original(stored, numbers)

    StoredRows.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        StoredRows.read = original  # type: ignore[method-assign]


def _assert_part_is_read(env: Env, seen: list[int]) -> None:
    """Of two workers each reads half of the rows, of whole batches exactly."""
    if env.is_reference or not env.setup.is_multi_worker:
        assert not seen
        return
    # Two passes over `x` and `y`, and two over the validation data; two more over
    # both; two over `x`, since `y` is in memory; one over the parts of the split.
    rows = 2 * 2 * 2 * NUM_ROWS + 2 * 2 * NUM_ROWS + 2 * NUM_ROWS + NUM_ROWS
    assert abs(sum(seen) - rows / 2) <= 12, (sum(seen), rows / 2)
