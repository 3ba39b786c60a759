"""The factor of a warmup, update by update."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfdp.features.warmup import Warmup, WarmupOptions


def started(options: WarmupOptions) -> Warmup:
    warmup = Warmup(keras.Variable, options.momentum_correction)
    warmup.set(options)
    return warmup


def factors(options: WarmupOptions, count: int) -> list[float]:
    warmup = started(options)
    return [float(warmup.factor(tf.constant(step))) for step in range(count)]


def test_warmup_grows_by_the_same_amount_each_update_and_then_stays():
    found = factors(WarmupOptions(steps=5, first=0.2, last=1.2), 8)
    np.testing.assert_allclose(found, [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.2, 1.2])


def test_warmup_may_go_down_and_may_take_one_update():
    assert factors(WarmupOptions(2, 3.0, 1.0), 4) == [3, 2, 1, 1]
    assert factors(WarmupOptions(1, 0.5, 4.0), 3) == [0.5, 4, 4]


def test_warmup_begins_and_ends_exactly_on_its_factors():
    for first, last in [(0.1, 0.7), (1 / 3, 8.0), (1.0, 3.0)]:
        found = factors(WarmupOptions(7, first, last), 9)
        assert (found[0], found[7], found[8]) == (first, last, last)


def test_warmup_counts_from_the_update_at_which_it_starts():
    assert factors(WarmupOptions(2, 1.0, 3.0, start=3), 7) == [1, 1, 1, 1, 2, 3, 3]


def test_growth_is_the_quotient_of_neighbours_and_one_at_the_ends():
    warmup = started(WarmupOptions(2, 1.0, 4.0))
    found = [float(warmup.growth(tf.constant(step))) for step in range(5)]
    np.testing.assert_allclose(found, [1.0, 2.5, 1.6, 1.0, 1.0])


def test_the_first_growth_is_from_the_rate_of_the_updates_before_the_warmup():
    warmup = started(WarmupOptions(2, 0.5, 1.0, start=3))
    found = [float(warmup.growth(tf.constant(step))) for step in range(3, 7)]
    np.testing.assert_allclose(found, [0.5, 1.5, 4 / 3, 1.0])


def test_growth_from_nothing_is_one():
    warmup = started(WarmupOptions(2, 0.0, 1.0))
    assert [float(warmup.growth(tf.constant(s))) for s in range(3)] == [1.0, 1.0, 2.0]


def test_warmup_that_is_switched_off_leaves_the_rate_alone():
    warmup = started(WarmupOptions(4, 0.1, 8.0))
    warmup.set(None)
    assert [float(warmup.factor(tf.constant(step))) for step in (0, 2, 9)] == [1, 1, 1]
