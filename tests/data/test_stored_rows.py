"""Arrays in files: which rows a worker reads of them, and that they are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tests.data.test_early_rows import flat
from tests.harness.tiers import full
from tfdp.ground._compat import keras_data
from tfdp.training.data.early_rows import divide_early
from tfdp.training.data.own_rows import (
    StoredArraysAdapter,
    StoredRows,
    has_stored_arrays,
)

BATCH = 8
NUM_ROWS = 29  # of the last batch, of five rows, each of four replicas has one or two
WORKERS = {"two of two": ([1], 2), "four, on two workers": ([2, 3], 4)}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that are read from files, in order."""
    numbers: list[int] = []
    original = StoredRows.read

    def record(stored: StoredRows, rows: np.ndarray) -> np.ndarray:
        numbers.extend(rows.tolist())
        return original(stored, rows)

    monkeypatch.setattr(StoredRows, "read", record)
    return numbers


def array(dtype: str = "float32") -> np.ndarray:
    return np.arange(6 * NUM_ROWS).reshape(NUM_ROWS, 3, 2).astype(dtype)


def mapped(folder: Path, dtype: str = "float32") -> np.memmap:
    np.save(folder / "x.npy", array(dtype))
    return np.load(folder / "x.npy", mmap_mode="r")


def in_hdf5(folder: Path, **options: Any) -> h5py.Dataset:
    file = h5py.File(folder / "x.h5", "w")
    return file.create_dataset("x", data=array(), **options)


KINDS = {
    "memmap": (mapped, {}),
    "memmap of float64": (mapped, {"dtype": "float64"}),
    "HDF5": (in_hdf5, {}),
    "HDF5 in chunks": (in_hdf5, {"chunks": (4, 3, 2), "compression": "gzip"}),
}


def dataset_of(x: Any, shuffle: bool | str, stored: bool) -> tf.data.Dataset:
    tf.random.set_seed(5)
    y = np.arange(NUM_ROWS)
    arguments = {"x": {"a": x}, "y": [y, y], "batch_size": BATCH, "shuffle": shuffle}
    if stored:
        assert has_stored_arrays(arguments)
        return StoredArraysAdapter(arguments).get_tf_dataset()
    arguments["x"] = {"a": np.array(x)}
    return keras_data.ArrayDataAdapter(**arguments).get_tf_dataset()


# The quick tier has each kind and each way to shuffle.
SHUFFLED = [
    (kind, shuffle) if kind == "memmap" or shuffle == "batch" else full(kind, shuffle)
    for kind in KINDS
    for shuffle in (False, True, "batch")
    if (kind, shuffle) != ("HDF5 in chunks", True)  # is read into memory
]


@pytest.mark.parametrize("workers", [full("two of two"), "four, on two workers"])
@pytest.mark.parametrize(("kind", "shuffle"), SHUFFLED)
def test_a_worker_reads_its_own_rows_only(kind, shuffle, workers, tmp_path, read):
    make, options = KINDS[kind]
    ranks, num_replicas = WORKERS[workers]
    x = make(tmp_path, **options)
    wanted = divide_early(dataset_of(x, shuffle, False), ranks, num_replicas)
    found = divide_early(dataset_of(x, shuffle, True), ranks, num_replicas)
    assert found.obstacle == ""
    assert found.dataset.element_spec == wanted.dataset.element_spec
    for _ in range(2):
        read.clear()
        rows = []
        for own, other in zip(found.dataset, wanted.dataset, strict=True):
            for one, two in zip(flat(own), flat(other), strict=True):
                np.testing.assert_array_equal(one, two)
            rows.extend(n for part in other[0] for n in part[1][0].numpy().tolist())
        # The labels of rows are their numbers; batches are read side by side.
        assert sorted(read) == sorted(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_batches_are_those_of_the_array(kind, tmp_path):
    make, options = KINDS[kind]
    x = make(tmp_path, **options)
    found, wanted = (dataset_of(x, "batch", stored) for stored in (True, False))
    assert found.element_spec == wanted.element_spec
    for own, other in zip(found, wanted, strict=True):
        for one, two in zip(flat(own), flat(other), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_what_is_better_in_memory_is_left_to_keras(shuffle, tmp_path):
    chunked = in_hdf5(tmp_path, chunks=(4, 3, 2))
    given = {"x": chunked, "y": np.zeros(NUM_ROWS), "shuffle": shuffle}
    assert has_stored_arrays(given) == (shuffle is not True)
    assert not has_stored_arrays({"x": array(), "shuffle": shuffle})
    classes = {"x": array(), "y": mapped(tmp_path, "int32"), "shuffle": shuffle}
    assert has_stored_arrays(classes)
    assert not has_stored_arrays(classes | {"class_weight": {0: 1.0}})
    assert not has_stored_arrays({"x": iter([]), "shuffle": shuffle})
