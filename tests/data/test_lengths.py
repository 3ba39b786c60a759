"""After how many steps an epoch ends for workers with different numbers of batches."""

from __future__ import annotations

import json

import pytest

from tfdp.training.data.same_datasets import (
    ENDLESS,
    Length,
    agreed_steps,
    dropped_batches,
)


@pytest.mark.parametrize(
    ("steps", "shortest", "longest"),
    [
        ((4, 4), 4, 4),
        ((4, 6), 4, 6),
        ((4, 0), 0, 4),
        ((4, None), None, None),
        ((ENDLESS, 6, 5), 5, None),
        ((ENDLESS, ENDLESS), None, None),
        ((ENDLESS, None), None, None),
    ],
)
def test_an_epoch_ends_with_the_shortest_or_the_longest(steps, shortest, longest):
    lengths = [Length(each) for each in steps]
    assert agreed_steps(lengths, stops=True) == shortest
    assert agreed_steps(lengths, stops=False) == longest


def test_what_is_left_out_is_said_in_batches_of_each_worker():
    lengths = [Length(12, 2), Length(8, 2), Length(ENDLESS, 2)]
    assert dropped_batches(lengths) == "2 of worker 0, endlessly many of worker 2"
    assert [str(length) for length in lengths] == ["6", "4", "endlessly many"]


@pytest.mark.parametrize("steps", [(4, 4), (None, 4), (ENDLESS, ENDLESS)])
def test_nothing_is_left_out_where_all_end_together_or_nobody_knows(steps):
    assert dropped_batches([Length(each) for each in steps]) == ""


@pytest.mark.parametrize(
    "length", [Length(None), Length(ENDLESS), Length(8, 2), Length(3, 1, 8, 5)]
)
def test_a_length_that_another_worker_is_told_is_the_same(length):
    assert Length(*json.loads(json.dumps(length))) == length
