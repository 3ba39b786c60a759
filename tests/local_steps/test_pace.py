"""Inner steps that slow workers leave out: which they are, and who is slow."""

from __future__ import annotations

import itertools
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.features.local_steps import (
    LocalStepsOptions,
    OuterOptions,
    step_fractions,
    workers_by_node,
)
from tfdp.features.local_steps.pace import Pace


def model_of(steps_per_execution: int) -> Any:
    counter = tf.Variable(0)
    features = types.SimpleNamespace(
        independent_groups=types.SimpleNamespace(updates=tf.Variable(0))
    )
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(num_local=1))
    return types.SimpleNamespace(
        steps_per_execution=steps_per_execution,
        optimizer=types.SimpleNamespace(iterations=counter, features=features),
        distribute_strategy=strategy,
    )


def made_by(share: float, *, rounds: int, at_a_time: int = 1, **outer: int) -> list:
    """The numbers of the updates that a worker makes of rounds of 12."""
    options = OuterOptions(keras.optimizers.SGD(0.7), "replica", **outer)
    pace = Pace(LocalStepsOptions(12, options, is_dynamic=True))
    pace.share = share
    model, made = model_of(at_a_time), []
    numbers = itertools.count(1)

    def compute(iterator: Any) -> dict:
        made.extend(next(iterator) for _ in range(at_a_time))
        return {"loss": made[-1]}

    for _ in range(rounds * 12 // at_a_time):
        assert pace.step(model, compute, numbers) == {"loss": made[-1]}
    left_out = rounds * 12 - len(made)
    # Schedules and exchanges count what is left out; the others in their own graph.
    assert int(model.optimizer.iterations) == left_out
    assert int(model.optimizer.features.independent_groups.updates) == left_out
    return made


def test_a_fast_worker_makes_all_updates():
    assert made_by(1.0, rounds=2) == list(range(1, 25))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.75])
def test_a_slow_worker_makes_its_share_of_the_updates_of_each_round(share: float):
    made = np.array(made_by(share, rounds=10))
    counts = np.bincount((made - 1) // 12)
    np.testing.assert_allclose(counts, share * 12, atol=1.5)
    assert len(made) == pytest.approx(share * 120, abs=1)


@pytest.mark.parametrize(
    ("outer", "places"),
    [
        ({}, {0}),
        ({"fragments": 3}, {4, 8, 0}),
        ({"fragments": 2, "delay": 2}, {6, 8, 0, 2}),
    ],
)
def test_nobody_leaves_out_an_exchange_nor_all_between_two(outer: dict, places: set):
    made = made_by(0.01, rounds=5, **outer)
    assert {number for number in range(1, 61) if number % 12 in places} <= set(made)
    # One between two exchanges is timed, so that who becomes fast again is found.
    assert len(made) == 5 * 2 * len(places)


def test_a_part_of_an_execution_is_left_out_like_the_rest():
    pace = Pace(LocalStepsOptions(100, is_dynamic=True))
    pace.share = 0.01
    model, batches = model_of(4), iter(range(10))

    def compute(iterator: Any) -> dict:
        return {"made": [next(iterator) for _ in range(4)]}

    for _ in range(3):
        assert pace.step(model, compute, batches) == {"made": [0, 1, 2, 3]}
    assert int(model.optimizer.iterations) == 6
    with pytest.raises(StopIteration):
        pace.step(model, compute, batches)


def test_executions_of_several_steps_are_left_out_as_a_whole():
    assert made_by(0.01, rounds=1, at_a_time=3) == [1, 2, 3, 10, 11, 12]


def test_a_meeting_begins_a_new_round():
    pace = Pace(LocalStepsOptions(12, is_dynamic=True))
    pace.share = 0.01
    model, made = model_of(1), []
    numbers = itertools.count(1)
    for number in range(1, 19):
        if number == 6:
            pace.restart()
        pace.step(model, lambda it: made.append(next(it)), numbers)
    assert made == [1, 6, 17, 18]


def test_a_step_takes_what_is_between_exchanges(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pace = Pace(LocalStepsOptions(12, is_dynamic=True))
    model = model_of(1)

    def compute(iterator: Any) -> dict:
        nonlocal now
        # The first is traced, each twelfth waits for others.
        number = next(iterator)
        now += 50.0 if number == 1 or number % 12 == 0 else 0.25
        return {}

    numbers = itertools.count(1)
    assert pace.pop_mean_seconds() is None
    for share in 1.0, 0.4:
        pace.share = share
        for _ in range(24):
            pace.step(model, compute, numbers)
        assert pace.pop_mean_seconds() == 0.25
    assert pace.pop_mean_seconds() is None


def test_who_is_slower_makes_fewer_steps():
    alone = [[0], [1], [2], [3]]
    assert step_fractions([0.2, 0.2, 0.2, 0.2], alone) == [1, 1, 1, 1]
    assert step_fractions([0.2, 0.1, 0.105, 0.4], alone) == [0.5, 1, 1, 0.25]
    # Who trains with a slower one is as slow.
    assert step_fractions([0.1, 0.2, 0.4, 0.1], [[0, 1], [2, 3]]) == [1, 1, 0.5, 0.5]
    assert step_fractions([0.2, None], [[0], [1]]) is None


@pytest.mark.parametrize(
    ("nodes", "workers", "together"),
    [
        (((0, 1), (2, 3)), [0, 1, 2, 3], [[0, 1], [2, 3]]),
        (((0, 1), (2, 3)), [0, 0, 1, 1], [[0], [1]]),
        # Nodes that workers are cut by: each has collectives with the next.
        (((0, 1), (2, 3), (4, 5), (6, 7)), [0, 0, 0, 1, 1, 2, 2, 3], [[0, 1, 2, 3]]),
    ],
)
def test_a_node_of_several_workers_makes_its_steps_together(nodes, workers, together):
    group = types.SimpleNamespace(nodes=nodes, workers=workers)
    extended = types.SimpleNamespace(
        group=group, worker_group=types.SimpleNamespace(num_workers=4)
    )
    strategy = types.SimpleNamespace(extended=extended)
    assert workers_by_node(strategy, "node") == together
    assert workers_by_node(strategy, "replica") == [[0], [1], [2], [3]]


def test_batches_that_are_accumulated_are_not_left_out():
    strategy = tfdp.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    callbacks = [
        tfdp.callbacks.GradientAccumulation(2),
        tfdp.callbacks.DiLoCo(4, scope="replica", dynamic_steps=True),
    ]
    with pytest.raises(ValueError, match="Received: accumulation_steps=2"):
        model.fit(np.ones((8, 2)), np.ones(8), verbose=0, callbacks=callbacks)
