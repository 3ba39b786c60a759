"""Values of arrays on several workers: what differs, by how much, and what is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from tfdp.ground._compat import keras_data
from tfdp.training.data import batch_labels
from tfdp.training.data.array_parts import ArrayPart
from tfdp.training.data.batch_labels import LabelRecord, class_labels
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.same_datasets import values_of_sources
from tfdp.training.data.value_differences import find_difference

WITHIN_SECONDS = 60.0
NUM_ROWS = 40
ORDER = np.random.RandomState(0).permutation(NUM_ROWS)
SAME_ROWS = " with the same rows in another order on worker 1 than on worker 0"
OTHER = " with other values on worker 1 than on worker 0"


class Threads:
    """Workers as threads, which gather texts."""

    def __init__(self, num_workers: int) -> None:
        self.values: list[Any] = [None] * num_workers
        self.barrier = threading.Barrier(num_workers, timeout=WITHIN_SECONDS)
        self.topics: set[str] = set()

    def worker(self, rank: int) -> Any:
        def all_gather(topic: str, value: Any) -> list[Any]:
            self.topics.add(topic)
            self.values[rank] = json.loads(json.dumps(value))
            self.barrier.wait()
            return self.values

        return mock.Mock(rank=rank, all_gather=all_gather)


def difference(values: Sequence[ArrayValues]) -> str:
    """What each worker finds, the same on all."""
    told = [json.loads(json.dumps(each.fingerprints())) for each in values]
    threads = Threads(len(values))

    def find(rank: int) -> str:
        return find_difference(threads.worker(rank), "values", told, values[rank])

    with ThreadPoolExecutor(len(values)) as pool:
        found = set(pool.map(find, range(len(values)), timeout=WITHIN_SECONDS))
    assert len(found) == 1, found
    return found.pop()


def of(*arrays: Any) -> str:
    return difference([ArrayValues({"x": array}) for array in arrays])


def numbers(dtype: Any = "float32") -> np.ndarray:
    values = np.random.RandomState(1).normal(size=(NUM_ROWS, 3)) * 50
    return values.astype(dtype)


def in_hdf5(array: np.ndarray, folder: Path, name: str, **options: Any) -> h5py.Dataset:
    return h5py.File(folder / name, "w").create_dataset("x", data=array, **options)


def as_table(array: np.ndarray) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": array[:, 0], "b": [f"{x:.3f}" for x in array[:, 1]]})


def as_torch(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


KINDS = {
    "float32": lambda x: x,
    "float64": lambda x: x.astype("float64"),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "complex64": lambda x: x.astype("complex64"),
    "int64": lambda x: x.astype("int64"),
    "int8": lambda x: x.astype("int8"),
    "bool": lambda x: x > 0,
    "one column": lambda x: x[:, 0],
    "strings": lambda x: x[:, 0].astype(str),
    "objects": lambda x: np.array([f"{v:.1f}" for v in x[:, 0]], object),
    "dates": lambda x: (x[:, 0] * 1000).astype("datetime64[s]"),
    "records": lambda x: np.array([(1, v) for v in x[:, 0]], "i1,f8"),
    "big-endian": lambda x: x.astype(">f4"),
    "a transposed array": lambda x: np.asfortranarray(x),
    "a tensor": tf.constant,
    "a tensor of strings": lambda x: tf.constant(x[:, 0].astype(str)),
    "a variable": tf.Variable,
    "torch": as_torch,
    "a table": as_table,
}


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_is_found_and_equal_values_are_not(kind: str):
    x = numbers()
    x[3, 1] = np.nan if kind in ("float32", "a tensor", "a table") else x[3, 1]
    first, again, shuffled = (KINDS[kind](a) for a in (x, x.copy(), x[ORDER]))
    assert of(first, again) == ""
    assert of(first, shuffled) == f"x{SAME_ROWS}"


@pytest.mark.parametrize("kind", ["ragged", "sparse", "scipy"])
def test_another_order_of_composite_arrays_has_other_values(kind: str):
    make = {
        "ragged": lambda x: tf.RaggedTensor.from_row_splits(x.ravel(), [0, 7, 9, 120]),
        "sparse": lambda x: tf.sparse.from_dense(x * (x > 0)),
        "scipy": lambda x: scipy.sparse.csr_matrix(x * (x > 0)),
    }[kind]
    x = numbers()
    other = x.copy()
    other[np.where(x > 0)[0][5], np.where(x > 0)[1][5]] = 99
    assert of(make(x), make(x.copy())) == ""
    assert of(make(x), make(other)) == f"x{OTHER}"


def test_arrays_of_one_value_in_several_classes_are_equal():
    x = numbers()
    assert of(x, tf.constant(x), x.astype(">f4"), np.asfortranarray(x)) == ""


def test_one_other_value_is_found_wherever_it_is():
    for dtype in ("float32", "int64", "uint8"):
        x = np.abs(numbers(dtype))
        for row in (0, 17, NUM_ROWS - 1):
            other = x.copy()
            other[row, 1] += 9
            assert of(x, other) == f"x{OTHER}", (dtype, row)


@pytest.mark.parametrize("num_rows", [4, NUM_ROWS, 20_000])
def test_values_that_differ_by_rounding_are_taken_as_equal(num_rows: int):
    x = np.random.RandomState(2).normal(size=(num_rows, 3)).astype("float32")
    rounded = x * (1 + 1e-6 * np.sign(np.random.RandomState(3).normal(size=x.shape)))
    assert (rounded.astype("float32") != x).any()
    assert of(x, rounded.astype("float32")) == ""
    other = x.copy()
    other[num_rows // 2] = -x[num_rows // 2]
    assert of(x, other) == f"x{OTHER}"
    # Whole numbers do not round.
    assert of((x * 1e6).astype("int64"), (rounded * 1e6).astype("int64")) == f"x{OTHER}"


def test_not_a_number_on_one_worker_is_another_value():
    x = numbers()
    other = x.copy()
    other[5, 0] = np.nan
    assert of(x, other) == f"x{OTHER}"


def test_each_array_and_each_worker_that_differs_is_named():
    x, y = numbers(), np.arange(NUM_ROWS)
    arrays = [{"x": x, "y": y, "same": x}] * 4
    arrays[2] = {"x": x[ORDER], "y": y[ORDER], "same": x}
    arrays[1] = arrays[3] = {"x": x, "y": y + 1, "same": x}
    found = difference([ArrayValues(each) for each in arrays])
    assert found == (
        "y with other values on workers 1 and 3; x, y with the same rows in another "
        "order on worker 2 than on worker 0"
    )


def test_equal_values_need_no_second_message():
    values = ArrayValues({"x": numbers()})
    group = mock.Mock(rank=0)
    assert find_difference(group, "values", [values.fingerprints()] * 2, values) == ""
    group.all_gather.assert_not_called()


def test_of_large_arrays_evenly_spaced_rows_are_read_and_small_ones_whole():
    x = np.zeros([20_000, 1000], "float32")  # 80 MB
    y = np.arange(20_000)
    told = ArrayValues({"x": x, "y": y}).fingerprints()
    (num_read,) = told["x"][0]
    assert 2000 < num_read <= 4096
    assert told["y"][0] == [20_000]
    for row in (0, -1):
        x[row] = 1
        assert ArrayValues({"x": x}).fingerprints()["x"][1] != told["x"][1]
        x[row] = 0
    tensor = ArrayValues({"x": tf.constant(x), "y": y}).fingerprints()
    assert tensor == told


@pytest.mark.parametrize("kind", ["memory map", "hdf5", "chunks"])
def test_few_rows_are_read_of_arrays_in_files(kind: str, tmp_path: Path):
    x = np.arange(30_000 * 60, dtype="float32").reshape(30_000, 60)  # 7.2 MB
    if kind == "memory map":
        np.save(tmp_path / "x.npy", x)
        stored = np.load(tmp_path / "x.npy", mmap_mode="r")
    else:
        options = {"chunks": (3000, 60), "compression": 1} if kind == "chunks" else {}
        stored = in_hdf5(x, tmp_path, "x.h5", **options)
    read: list[int] = []
    original = type(stored).__getitem__

    def getitem(array: Any, rows: Any) -> Any:
        if isinstance(rows, np.ndarray):
            read.extend(rows.tolist())
        return original(array, rows)

    with mock.patch.object(type(stored), "__getitem__", getitem):
        (count,), digest = ArrayValues({"x": stored}).fingerprints()["x"]
    assert digest is not None
    # Of a chunk of 720 kB as many as 4 MB have.
    assert count == len(read) == (5 if kind == "chunks" else 64)
    assert (read[0], read[-1]) == (0, 29_999)
    # One worker may have it in memory.
    assert of(stored, x) == ""


def test_a_small_array_in_a_file_is_compared_whole(tmp_path: Path):
    x = numbers()
    stored = [in_hdf5(each, tmp_path, f"{i}") for i, each in enumerate((x, x[ORDER]))]
    assert of(*stored) == f"x{OTHER}"
    assert of(stored[0], x) == ""


class Unreadable:
    """Has a shape, and no values."""

    shape = (NUM_ROWS, 2)
    dtype = np.dtype("float32")

    def __array__(self, *_: Any) -> np.ndarray:
        raise RuntimeError("nothing to see")


def test_what_cannot_be_read_or_has_another_length_is_not_compared():
    assert of(Unreadable(), Unreadable()) == ""
    assert of(numbers(), Unreadable()) == ""
    assert of(numbers(), numbers()[1:]) == ""


def test_a_description_that_fails_leaves_no_worker_waiting():
    x = numbers()
    with mock.patch.object(ArrayPart, "describe", side_effect=MemoryError):
        assert of(x, x[ORDER]) == f"x{OTHER}"


def sources(*datasets: tf.data.Dataset) -> str:
    return difference([values_of_sources(dataset) for dataset in datasets])


def files(*names: str) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(list(names))


def test_sources_of_datasets_are_compared_and_not_what_is_made_of_them():
    x = numbers()

    def make(x: np.ndarray, first: int = 0, seed: int = 1) -> tf.data.Dataset:
        y = np.arange(len(x))
        data = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).shuffle(9, seed)
        data = tf.data.Dataset.zip((data, tf.data.Dataset.range(first, first + 99)))
        return data.map(lambda d, i: (d["x"] + tf.random.normal([3]), i)).batch(4)

    assert sources(make(x), make(x.copy(), seed=2)) == ""
    assert sources(make(x), make(x[ORDER])) == f"from_tensor_slices[0]{SAME_ROWS}"
    assert sources(make(x), make(x, first=99)) == f"range[2]{OTHER}"
    # Other lengths are warned of where batches are counted.
    assert sources(make(x), make(x[1:])) == ""
    assert sources(tf.data.Dataset.range(9), tf.data.Dataset.range(8)) == ""


def test_an_array_beside_files_of_text_is_compared():
    def make(x: np.ndarray) -> tf.data.Dataset:
        text = tf.data.TextLineDataset(["a", "b"])
        return tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(x), text)

    x = numbers()
    assert sources(make(x), make(x.copy())) == ""
    assert sources(make(x), make(x[ORDER])) == f"from_tensor_slices[0]{SAME_ROWS}"


def test_names_of_files_are_compared_without_their_folders():
    for make in (
        files,
        lambda *names: tf.data.TextLineDataset(list(names)),
        lambda *names: tf.data.FixedLengthRecordDataset(list(names), 4),
        lambda *names: tf.data.Dataset.from_tensor_slices(list(names)).interleave(
            files
        ),
    ):
        first = make("/of0/a", "/of0/b", "/of0/c")
        found = f"from_tensor_slices[0]{SAME_ROWS}"
        assert sources(first, make("/of1/a", "/of1/b", "/of1/c")) == ""
        assert sources(first, make("/of1/b", "/of1/a", "/of1/c")) == found
        split = make("/of1/b", "/of1/c", "/of1/d")
        assert sources(first, split) == f"from_tensor_slices[0]{OTHER}"
        # Copies under names of their own.
        assert sources(first, make("/tmp/x1", "/tmp/x2", "/tmp/x3")) == ""


def test_labels_of_classes_are_those_that_augmentation_keeps():
    words = np.array(["cat", "dog"], object)
    one_hot = np.eye(3, dtype="float32")[[2, 0]]
    for labels in (np.array([3, 1]), np.array([[3.0], [1.0]]), words, one_hot):
        assert list(class_labels((None, labels))) == ["y"], labels
    boxes, mask = np.array([[0.5], [1.0]]), np.zeros([2, 8, 8], "int32")
    tokens, mixed = np.array([[4, 5], [6, 0]]), 0.5 * one_hot + 0.5 * one_hot[::-1]
    for targets in (boxes, mask, tokens, mixed, np.float32(1), None, 3):
        assert class_labels((None, targets)) == {}, targets
    assert class_labels((np.zeros(3),)) == {}
    assert class_labels(None) == {}
    assert list(class_labels((None, {"a": np.arange(2), "b": boxes}))) == ["y['a']"]


def test_arrays_of_fit_are_not_read_again_as_sources():
    adapter = keras_data.ArrayDataAdapter(numbers(), np.arange(NUM_ROWS), batch_size=4)
    assert values_of_sources(adapter.get_tf_dataset()).fingerprints() == {}


def test_labels_are_kept_of_the_pass_that_began_last_and_only_if_asked():
    record = LabelRecord(restarts=True)
    labels = np.zeros(2, "int32")

    def batches() -> Iterator[tuple]:
        for number in range(1, 4):
            labels[:] = number  # a generator uses its array again
            yield None, labels

    assert len(list(record.watch(batches()))) == 3
    assert record.labels_of(1) == {}
    record.is_active = True
    before = record.watch(batches())
    next(before)
    list(record.watch(batches()))
    list(before)
    assert [record.labels_of(n)["y"].tolist() for n in (1, 3)] == [[1, 1], [3, 3]]
    assert record.labels_of(4) == {}
    with mock.patch.object(batch_labels, "_NUM_KEPT_BATCHES", 2):
        list(record.watch(batches()))
    assert [len(record.labels_of(n)) for n in (1, 2, 3)] == [0, 1, 1]
