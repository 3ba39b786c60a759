"""Sums are those of float64, rounded once, in the order that is given."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.schedules import equal_bounds, pipeline, segment_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def all_halves(dtype) -> np.ndarray:
    """Each of the 65536 values, NaNs among them."""
    return np.arange(65536, dtype=np.uint16).view(dtype)


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 257, 30_011])
def test_sums_of_all_halves_are_rounded_to_nearest_even(dtype, shift):
    one = all_halves(dtype)
    other = np.roll(all_halves(dtype), shift)
    with np.errstate(all="ignore"):
        expected = (one.astype(np.float32) + other.astype(np.float32)).astype(dtype)
    found = one.copy()
    sum_into(found, [found, other])
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(
        found.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan]
    )


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", BFLOAT16])
def test_the_order_does_not_depend_on_which_addend_is_the_target(dtype, own):
    generator = np.random.default_rng(0)
    addends = [(100 * generator.standard_normal(1000)).astype(dtype) for _ in range(4)]
    expected = np.empty_like(addends[0])
    sum_into(expected, addends)
    target = addends[own]
    sum_into(target, addends)
    assert target.tobytes() == expected.tobytes()


@pytest.mark.parametrize("own", range(3))
def test_an_addend_may_be_another_view_of_the_targets_memory(own):
    addends = [np.full(5, 10.0**power, np.float32) for power in range(3)]
    sum_into(addends[own][:], addends)
    assert addends[own].tolist() == 5 * [111.0]


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32"])
def test_an_overflow_is_infinity_and_no_warning(dtype):
    most = np.array([ml_dtypes.finfo(dtype).max], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum_into(most, [most, most.copy()])
    assert np.isposinf(most.astype(np.float32)[0])


@pytest.mark.parametrize("length", [0, 1, 5, 17])
def test_bounds_cover_all_elements(length):
    for size in (1, 2, 3, 8):
        bounds = equal_bounds(length, size)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, length, size + 1)
        assert set(np.diff(bounds)) <= {length // size, length // size + 1}


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("num_segments", [0, 1, 2, 7])
@pytest.mark.parametrize("steps", [range(1), range(2), range(3, 9)])
def test_a_segment_makes_each_step_once_and_in_order(num_segments, steps, lag):
    order = list(pipeline(num_segments, steps, lag))
    assert sorted(order) == [(n, step) for n in range(num_segments) for step in steps]
    for number in range(num_segments):
        assert [step for n, step in order if n == number] == list(steps)
    for step in steps:
        assert [n for n, s in order if s == step] == list(range(num_segments))


def test_segments_end_where_their_part_ends():
    bounds = [0, 0, 10, 25]
    found = [segment_of(bounds, part, n, 8) for part in range(3) for n in range(2)]
    assert [(where.start, where.stop) for where in found] == [
        *[(0, 0), (0, 0)],
        *[(0, 8), (8, 10)],
        *[(10, 18), (18, 25)],
    ]
