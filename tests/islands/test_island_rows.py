"""Rows of an island: together all rows of each batch that has one for each."""

from __future__ import annotations

import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.harness import common
from tfdp.callbacks import DiLoCo
from tfdp.features.islands.island import Island
from tfdp.features.islands.training import IslandTraining
from tfdp.training.data.distribute import rows_of_part
from tfdp.training.keras_hooks import saving

NUM_ROWS, BATCH_SIZE = 21, 10


def islands(count: int) -> list[Island]:
    return [Island(index, count, "h:1", "s") for index in range(count)]


def from_generator() -> tf.data.Dataset:
    """A dataset of which rows cannot be taken before they are prepared."""
    spec = tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(range(NUM_ROWS)), output_signature=spec
    )
    return dataset.batch(BATCH_SIZE)


@pytest.mark.parametrize(
    "make", [lambda: tf.data.Dataset.range(NUM_ROWS).batch(BATCH_SIZE), from_generator]
)
def test_each_row_is_that_of_one_island_and_all_make_as_many_steps(make):
    parts = [
        list(rows_of_part(make(), island.part).as_numpy_iterator())
        for island in islands(3)
    ]
    assert [len(batches) for batches in parts] == [2, 2, 2]
    seen = np.concatenate([batch for batches in parts for batch in batches])
    # The last batch has one row, which is left out.
    np.testing.assert_array_equal(np.sort(seen), np.arange(NUM_ROWS - 1))


def test_all_islands_have_one_seed_and_other_jobs_another():
    assert len({island.part.seed for island in islands(3)}) == 1
    assert Island(0, 3, "h:1", "another").part.seed != islands(3)[0].part.seed


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fragments": 2}, "`fragments`"),
        ({"compression": "int8"}, "`compression`"),
        ({"delay": 2, "scale_by_staleness": True}, "`scale_by_staleness`"),
        ({"dynamic_steps": True}, "`dynamic_steps`"),
        ({"scope": "replica"}, '`scope="replica"`'),
        ({"delay": 2, "min_participants": 3}, "at most the number of islands"),
    ],
)
def test_what_islands_cannot_do_is_refused_by_its_name(options, name):
    callback = DiLoCo(8, **options)
    with pytest.raises(ValueError, match=name):
        IslandTraining(common.mlp(), callback.options, {}, islands(2)[0])


def test_islands_that_save_at_one_path_write_files_of_their_own(tmp_path, monkeypatch):
    model, written = keras.Sequential(), []

    def save(model: object, filepath: str) -> None:
        written.append(filepath)
        pathlib.Path(filepath).write_text("")

    own, of_others = ".model.island1.worker1.keras", ".model.worker1.keras"
    for name in (own, of_others):
        (tmp_path / name).write_text("of a worker that is no more")
    for index in range(2):
        island = Island(index, 2, "a:1", "0123456789abcdef")
        monkeypatch.setattr(Island, "from_environment", lambda island=island: island)
        saving.save_atomically(save, model, str(tmp_path / "model.keras"))
    assert len(set(written)) == 2
    # What is not an island's own may be under way.
    assert sorted(os.listdir(tmp_path)) == [of_others, "model.keras"]
