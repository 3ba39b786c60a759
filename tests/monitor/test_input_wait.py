"""Advice on waiting for data."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdp.callbacks.input_probe import pipeline_of
from tfdp.features.monitor.input_wait import (
    ARRAYS,
    GENERATOR,
    PY_DATASET,
    InputWait,
    Pipeline,
    advise,
    mean_wait,
)

AUTO = tf.data.AUTOTUNE


def wait(share: float) -> InputWait:
    return InputWait(40, 1.0, share)


@pytest.mark.parametrize(
    ("shares", "pipeline", "expected"),
    [
        ([0.05, 0.19], {"has_serial_map": True}, "there is little to gain"),
        ([0.4], {}, "Training waits for its data for 40% of a step: give each worker"),
        ([0.4, 0.5], {}, "Worker 1 waits for its data for 50% of a step: give each"),
        (
            [0.5, 0.02],
            {"has_serial_map": True},
            "the others do not, so look at the disk",
        ),
        ([0.5, 0.4], {"obstacle": "it has `filter`"}, "its own: it has `filter`."),
        ([0.5, 0.02], {"obstacle": "it has `filter`"}, "its own: it has `filter`."),
        (
            [0.5],
            {"kind": GENERATOR, "has_serial_map": True},
            "make a `tf.data` pipeline",
        ),
        ([0.5], {"kind": PY_DATASET}, "more `workers`"),
        ([0.5], {"kind": ARRAYS}, "Python code between two steps"),
        ([0.5], {"has_serial_map": True, "has_map": True}, "`num_parallel_calls="),
        ([0.5], {"has_map": True}, "`cache()`"),
        ([0.5], {"has_map": True, "is_cached": True}, "a faster disk"),
    ],
)
def test_advice_names_the_worker_and_what_to_do(shares, pipeline, expected):
    said = advise(dict(enumerate(map(wait, shares))), Pipeline(**pipeline))
    assert expected in said
    assert said.endswith(".")


def test_steps_in_which_buffers_are_still_full_do_not_count():
    found = mean_wait([(1.0, 0.0)] * 10 + [(3.0, 1.5)] * 20)
    assert found == InputWait(20, 3.0, 1.5)
    assert mean_wait([(2.0, 1.0)]).share == 0.5


def test_properties_of_the_data_are_seen():
    rows = tf.data.Dataset.range(8)
    drawn = tf.data.Dataset.from_generator(
        lambda: iter(range(8)), output_signature=tf.TensorSpec([], tf.int64)
    )
    assert pipeline_of(rows.batch(2), None) == Pipeline()
    found = pipeline_of(rows.map(lambda x: x).cache().batch(2), None)
    assert found == Pipeline(has_serial_map=True, has_map=True, is_cached=True)
    found = pipeline_of(rows.map(lambda x: x, num_parallel_calls=AUTO).batch(2), None)
    assert found == Pipeline(has_map=True)
    assert pipeline_of(drawn.batch(2), None).kind == GENERATOR
    assert pipeline_of((x for x in "ab"), None).kind == GENERATOR
    assert pipeline_of(np.zeros(3), None) == Pipeline(ARRAYS)


class Whole(keras.utils.PyDataset):
    def __getitem__(self, index):
        return np.zeros([4, 1])


class Divided(Whole):
    def num_rows(self, index):
        return 4

    def rows(self, index, start, stop):
        return self[index][start:stop]


def test_who_makes_whole_batches_is_told_of_rows():
    extended = types.SimpleNamespace(worker_group=types.SimpleNamespace(num_workers=2))
    of_two = types.SimpleNamespace(extended=extended)
    assert "`rows` and `num_rows`" in pipeline_of(Whole(), of_two).obstacle
    assert pipeline_of(Divided(), of_two).obstacle == ""
    assert pipeline_of(Whole(), None).obstacle == ""
