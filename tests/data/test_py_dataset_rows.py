"""A `PyDataset` that gives rows: what is asked of it, and what is wrong with it."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from tests.data.cases_own_rows import BATCH, NUM_ROWS, Rows
from tests.harness import common
from tests.harness.interrupted import Layout, run
from tfdp.ground._compat import keras_data
from tfdp.training.data.own_rows import (
    LocalRowsDataset,
    describe_batches,
    supports_row_reads,
)


def data(**options: Any) -> Rows:
    return Rows(*common.regression_data(NUM_ROWS), **options)


def adapter(source: Rows, ranks: list[int], num_replicas: int, **options: Any) -> Any:
    dataset = LocalRowsDataset(source, ranks, num_replicas)
    options = {"class_weight": None, "shuffle": False} | options
    made = keras_data.RowsOfPyDatasetAdapter(dataset, **options)
    made.user_data = source
    return made


def rows_of(adapter: Any) -> list[tuple]:
    """One epoch: of each batch the first row of `x`, how many of `y`, and the total."""
    adapter.on_epoch_begin()
    found = [
        (float(item["rows"][0][0, 0]), len(item["rows"][1]), int(item["total"][0]))
        for item in adapter.get_tf_dataset().take(len(adapter.user_data))
    ]
    adapter.on_epoch_end()
    return found


@pytest.mark.parametrize("num_workers", [2, 4])
def test_all_workers_together_read_each_row_once(num_workers: int):
    touched = np.zeros(NUM_ROWS, int)
    for rank in range(num_workers):
        source = data()
        own = LocalRowsDataset(source, [rank], num_workers)
        for index in range(len(source)):
            own[index]
        for index, start, stop in source.read:
            touched[index * BATCH + start : index * BATCH + stop] += 1
    np.testing.assert_array_equal(touched, np.ones(NUM_ROWS))


def test_a_worker_without_a_row_is_given_one_that_tells_its_shape():
    source = Rows(*common.regression_data(BATCH + 1))
    item = LocalRowsDataset(source, [1], 2)[1]
    assert item["total"] == [1]
    assert len(item["rows"][0]) == 1


@pytest.mark.processes
def test_threads_and_processes_read_the_same_rows():
    expected = rows_of(adapter(data(), [1], 2))
    assert [total for _, _, total in expected] == [BATCH, BATCH, BATCH, 5]
    assert rows_of(adapter(data(workers=2), [1], 2)) == expected
    by_processes = data(workers=2, use_multiprocessing=True)
    assert rows_of(adapter(by_processes, [1], 2)) == expected


def test_batches_are_shuffled_as_keras_shuffles_them():
    orders = []
    for rank in range(2):
        keras.utils.set_random_seed(3)
        found = rows_of(adapter(data(), [rank], 2, shuffle=True))
        orders.append([total for _, _, total in found])
    assert orders[0] == orders[1] != [BATCH, BATCH, BATCH, 5]


class Endless(Rows):
    """The same batches again and again."""

    __len__ = None  # type: ignore[assignment]
    num_batches = None  # type: ignore[assignment]

    def num_rows(self, index: int) -> int:
        return BATCH

    def rows(self, index: int, start: int, stop: int) -> tuple:
        return super().rows(index % 3, start, stop)


def test_of_batches_without_an_end_rows_are_read_too():
    source = Endless(*common.regression_data(NUM_ROWS))
    endless = adapter(source, [1], 2)
    assert describe_batches(endless.py_dataset)["number of batches"] is None
    items = [int(item["total"][0]) for item in endless.get_tf_dataset().take(7)]
    assert items == 7 * [BATCH]
    assert all((start, stop) == (4, 8) for _, start, stop in source.read)


class Unrelated(Rows):
    """Has rows of another kind, as a class of the user's may."""

    rows: Any = ("a", "b")


class OneArgument(Rows):
    """The same, as a method."""

    def rows(self, index: int) -> int:  # type: ignore[override]
        return index


class Uncounted(Rows):
    """Does not tell how many rows a batch has."""

    num_rows = None  # type: ignore[assignment]


def test_only_a_class_with_both_methods_is_asked_for_rows():
    arrays = common.regression_data(NUM_ROWS)
    assert supports_row_reads(Rows(*arrays))
    assert not supports_row_reads(Unrelated(*arrays))
    assert not supports_row_reads(OneArgument(*arrays))
    assert not supports_row_reads(arrays)
    with pytest.warns(UserWarning, match=r"but no `num_rows\(index\)`"):
        assert not supports_row_reads(Uncounted(*arrays))


class Short(Rows):
    """Gives a row too few."""

    def rows(self, index: int, start: int, stop: int) -> tuple:
        return super().rows(index, start, stop - 1)


def test_another_number_of_rows_than_asked_for_is_an_error():
    source = Short(*common.regression_data(NUM_ROWS))
    with pytest.raises(ValueError, match=r"parts with these numbers of rows: \[3, 3\]"):
        LocalRowsDataset(source, [1], 2)[0]


@pytest.mark.parametrize("count", [0, -1, 2.0, None, True])
def test_a_wrong_count_of_rows_is_an_error(count: Any):
    source = data()
    source.num_rows = lambda index: count
    with pytest.raises(ValueError, match=r"Received: num_rows\(0\)="):
        LocalRowsDataset(source, [0], 2)[0]


class ShortOnLastWorker(Rows):
    """Gives a row too few of the third batch's last rows, to the last worker alone."""

    def rows(self, index: int, start: int, stop: int) -> tuple:
        is_wrong = index == 2 and stop == BATCH
        return super().rows(index, start, stop - is_wrong)


def fit_wrong_rows(layout: Layout, rank: int) -> dict:
    """Train on rows of which one worker finds only in the third step that they lack."""
    strategy = tfdp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = common.compiled(common.mlp())
    wrong = ShortOnLastWorker(*common.regression_data(NUM_ROWS))
    common.fit(model, wrong)
    return {}


@pytest.mark.full
@pytest.mark.processes
def test_rows_that_lack_on_one_worker_end_all_with_one_sentence(tmp_path):
    begin = time.monotonic()
    found = run(Layout(2, 1), fit_wrong_rows, tmp_path, {})
    assert time.monotonic() - begin < 60
    assert 0 not in found.codes
    other, wrong = (answer["text"] for answer in found.answers)
    assert wrong == (
        "`rows(2, 4, 8)` of ShortOnLastWorker must return 4 rows in each part of the "
        "batch. Received: parts with these numbers of rows: [3, 3]"
    )
    assert "worker 1" in other.lower(), other
