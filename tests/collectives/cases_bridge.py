"""Collectives after a step that has ended with an error, and was caught."""

from __future__ import annotations

import collections.abc

import numpy as np
import pytest
import tensorflow as tf

from tests.collectives.cases_primitives import each_replica, new_group
from tests.harness.env import Env
from tests.harness.registry import case
from tfdp.communication.collectives import Member, ProcessGroup
from tfdp.ground._compat import graphs

# Where a replica's step fails: before it has launched anything, while all its
# reductions may be under way, when one of them is done, when all are; or nowhere.
BEFORE, MEANWHILE, MIDST, AFTER, NOWHERE = range(5)
# Those of even ranks and of odd ones: the same, and different ones.
PLACES = (
    *((BEFORE, BEFORE), (MEANWHILE, MEANWHILE), (MIDST, MIDST), (AFTER, AFTER)),
    *((BEFORE, MEANWHILE), (MEANWHILE, BEFORE), (AFTER, BEFORE), (MIDST, AFTER)),
)
# A word, a message, and what is larger than one: on four channels, two on each.
LENGTHS = (1, 3, 1000, 70_000, 300_000, 1, 1_000_000, 1000)
TOLD = "An earlier step ended with an error on some workers only"

Where = collections.abc.Callable[[int], int]  # the place of a rank
Step = collections.abc.Callable[[int, Where], list]


def step_of(env: Env) -> Step:
    """A step in which each replica sums tensors of its number, and fails on demand."""
    group = new_group(env)

    @tf.function(autograph=False)
    def traced(number: tf.Tensor, places: tf.Tensor) -> list:
        def work(replica: int, rank: int) -> tf.Tensor:
            with graphs.independent_side_effects():
                return _sums(group, replica, number * (rank + 1.0), places[rank])

        return each_replica(env, work)

    def step(number: int, where: Where) -> list:
        places = [where(rank) for rank in range(env.num_replicas)]
        return traced(tf.constant(float(number)), tf.constant(places))

    return step


def _sums(
    group: ProcessGroup, replica: int, value: tf.Tensor, here: tf.Tensor
) -> tf.Tensor:
    """The least and the largest of each sum, `[2 * num_buckets]`."""
    with tf.control_dependencies([_check(here, BEFORE)]):
        own = tf.identity(value)
    sums = [
        Member(group, replica, channel=channel).all_reduce(tf.fill([length], own))
        for channel, length in enumerate(LENGTHS)
    ]
    with tf.control_dependencies([_some_time(here)]):
        meanwhile = _check(here, MEANWHILE)
    with tf.control_dependencies([sums[2]]):
        midst = _check(here, MIDST)
    with tf.control_dependencies(sums):
        after = _check(here, AFTER)
    with tf.control_dependencies([meanwhile, midst, after]):
        return tf.stack([f(s) for s in sums for f in (tf.reduce_min, tf.reduce_max)])


def _check(here: tf.Tensor, place: int) -> tf.Operation:
    """Fails where `here` is the place."""
    return tf.debugging.Assert(tf.not_equal(here, place), ["on purpose"])


def _some_time(here: tf.Tensor) -> tf.Tensor:
    """Computes for as long as a launch takes, where it matters."""
    turns = tf.where(tf.equal(here, MEANWHILE), 20, 0)
    return tf.while_loop(
        lambda i, _: i < turns, lambda i, x: (i + 1, x @ x), [0, tf.eye(200)]
    )[1]


def check_exact(env: Env, step: Step, number: int) -> None:
    """A step without an error gives the sums of its own number."""
    total = number * sum(rank + 1.0 for rank in range(env.num_replicas))
    for result in step(number, lambda rank: NOWHERE):
        np.testing.assert_array_equal(result, np.full(2 * len(LENGTHS), total))


@case(
    "a step that fails on all replicas, each at another place: the next is exact",
    compare=False,
)
def steps_after_one_that_failed_are_exact(env: Env) -> dict:
    step = step_of(env)
    check_exact(env, step, 1)
    for number, places in enumerate(PLACES, start=1):
        with pytest.raises(tf.errors.OpError):
            step(2 * number, lambda rank, p=places: p[rank % 2])
        check_exact(env, step, 2 * number + 1)
    return {}


@case(
    "a step that fails before its collectives on one worker: the others are told",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
def step_that_fails_on_one_worker_fails_on_all(env: Env) -> dict:
    step = step_of(env)
    check_exact(env, step, 1)
    told = "on purpose" if env.rank else TOLD
    with pytest.raises(tf.errors.OpError, match=told):
        step(2, lambda rank: BEFORE if env.rank else NOWHERE)
    check_exact(env, step, 3)
    return {}


@case(
    "a step that fails after its collectives on one worker: the others are told",
    setups=("two_workers", "two_by_two"),
    compare=False,
)
def worker_that_goes_on_alone_is_told_in_its_next_step(env: Env) -> dict:
    step = step_of(env)
    check_exact(env, step, 1)
    if env.rank:
        with pytest.raises(tf.errors.InvalidArgumentError, match="on purpose"):
            step(2, lambda rank: AFTER)
    else:
        check_exact(env, step, 2)
        with pytest.raises(tf.errors.UnavailableError, match=TOLD):
            step(3, lambda rank: NOWHERE)
    check_exact(env, step, 4)
    return {}
