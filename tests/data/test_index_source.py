"""Elements are loaded by their index, by the worker that trains on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.training.data.determinism import draws_seeds_once, nondeterminism_of
from tfdp.training.data.early_rows import divide_early

NUM = 52  # of the last batch each of 4 workers has a row


class Source:
    """Counts what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loaded.append(index)
        return {"x": [np.full((2, 3), index, "float32")], "name": f"row {index}"}


def flat(dataset: tf.data.Dataset) -> list[Any]:
    return [tf.nest.flatten(each) for each in dataset.as_numpy_iterator()]


def test_elements_are_those_of_the_source_in_their_structure():
    dataset = tfdp.data.from_source(Source())
    spec = {
        "x": (tf.TensorSpec((2, 3), tf.float32),),
        "name": tf.TensorSpec((), "string"),
    }
    assert dataset.element_spec == spec
    assert len(dataset) == NUM
    for index, element in enumerate(dataset.as_numpy_iterator()):
        np.testing.assert_array_equal(element["x"][0], np.full((2, 3), index))
        assert element["name"] == f"row {index}".encode()


@pytest.mark.parametrize("num_workers", [2, 4])
def test_all_workers_together_load_each_element_once(num_workers):
    source = Source()
    dataset = tfdp.data.from_source(source, seed=1).batch(16)
    whole = flat(dataset)
    parts = []
    source.loaded.clear()
    for rank in range(num_workers):
        dataset = tfdp.data.from_source(source, seed=1).batch(16).prefetch(2)
        division = divide_early(dataset, [rank], num_workers)
        assert division.obstacle == ""
        parts.append(flat(division.dataset.map(lambda rows, total: rows[0])))
    first = num_workers * [0]  # by which the structure is known
    assert sorted(source.loaded) == sorted([*range(NUM), *first])
    for step, (batch, *own) in enumerate(zip(whole, *parts, strict=True)):
        for leaf, *rows in zip(batch, *own, strict=True):
            np.testing.assert_array_equal(leaf, np.concatenate(rows), str(step))


def test_the_position_in_a_source_can_be_restored():
    dataset = tfdp.data.from_source(Source(), seed=1).batch(16)
    assert nondeterminism_of(dataset, is_ordered=True) is None
    assert draws_seeds_once(dataset)
    first, second = flat(dataset), flat(dataset)
    assert any((a[0] != b[0]).any() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([], r"`source` has no element. Received: source=\[\]"),
        (iter([1, 2]), "must have a length and an element for each index"),
        (7, "not only an iterator. Received: source=7"),
        (tf.data.Dataset.range(3), "must have a length and an element"),
        ([None], r"must be arrays, numbers or strings.* Received: source\[0\]=None"),
        ([{"x": object()}], "must be arrays, numbers or strings"),
    ],
)
def test_what_is_no_source_is_refused(source, text):
    with pytest.raises(ValueError, match=text):
        tfdp.data.from_source(source)


def test_a_seed_is_a_number():
    with pytest.raises(ValueError, match=r"`seed` must be an integer.* seed='a'"):
        tfdp.data.from_source([1], seed="a")


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (np.zeros(3), r"float64\[3\] at 1, after float64\[2\]"),
        (np.zeros(2, "float32"), r"float32\[2\] at 1"),
        ((np.zeros(2),), r"\('float64\[2\]',\) at 1"),
        (None, "NoneType at 1"),
    ],
)
def test_an_element_unlike_the_first_is_named(other, shown):
    dataset = tfdp.data.from_source([np.zeros(2), other])
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: .*{shown}"):
        flat(dataset)


def test_a_source_of_grain_is_loaded_by_index():
    grain = pytest.importorskip("grain")
    source = Source()
    augmented = (
        grain.MapDataset.source(source)
        .seed(3)
        .shuffle()
        .random_map(lambda element, rng: (element["x"][0] + rng.normal(), np.int32(1)))
    )
    whole = flat(tfdp.data.from_source(augmented).batch(16))
    source.loaded.clear()
    parts = []
    for rank in range(2):
        own = divide_early(tfdp.data.from_source(augmented).batch(16), [rank], 2)
        parts.append(flat(own.dataset.map(lambda rows, total: rows[0])))
    assert len(source.loaded) == NUM + 2
    for batch, *own in zip(whole, *parts, strict=True):
        rows = np.concatenate([each[0] for each in own])
        np.testing.assert_array_equal(batch[0], rows)
    with pytest.raises(ValueError, match="not only an iterator"):
        tfdp.data.from_source(augmented.to_iter_dataset())


def test_the_room_shows_its_public_names():
    assert tfdp.data.__all__ == ["from_source", "shard_files"]
    assert [name for name in dir(tfdp.data) if name[0] != "_"] == tfdp.data.__all__
    with pytest.raises(AttributeError, match="has no attribute 'shards'"):
        tfdp.data.shards  # noqa: B018
