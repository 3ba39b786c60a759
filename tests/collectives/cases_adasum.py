"""Adasum against its definition, on 2, 3, 4, 6 and 8 replicas."""

from __future__ import annotations

import functools
import typing

import numpy as np
import tensorflow as tf

from tests.collectives import adasum_definition as definition
from tests.collectives.cases_algorithms import (
    BF16,
    algorithm_case,
    check_same_bits,
    new_group,
    node_sizes,
    sent_by,
)
from tests.collectives.cases_primitives import run
from tests.harness.env import Env
from tests.harness.registry import case, same_as
from tfdp.communication.collectives import adasum, adasum_across_nodes

# One element, fewer than replicas, a prime number, and what lies in several halves.
SIZES = (1, 3, 1009, 64, 2, 500)


def own(rank: int, sizes: typing.Sequence[int] = SIZES) -> list[np.ndarray]:
    """Gradients of a replica that point neither the same way nor across."""
    random = np.random.default_rng(rank)
    common = np.random.default_rng(99)
    return [
        (common.normal(size=n) + (1 + rank) * random.normal(size=n)).astype("float32")
        for n in sizes
    ]


def flat(rank: int) -> np.ndarray:
    return np.concatenate(own(rank))


def members_of(env: Env, node_size: int) -> list[list[np.ndarray]]:
    """The gradients that are combined: sums over the replicas of each node."""
    every = [own(rank) for rank in range(env.num_replicas)]
    firsts = range(0, env.num_replicas, node_size)
    return [
        [sum(parts) for parts in zip(*every[first : first + node_size], strict=True)]
        for first in firsts
    ]


def check_definition(
    env: Env, algorithm: typing.Callable, wanted: np.ndarray, error: float
) -> None:
    """Compares what all replicas get, and that the bits are the same."""

    def reduce(replica, rank):
        return algorithm(tf.constant(flat(rank)), replica=replica, sizes=SIZES)

    results = run(env, reduce)
    check_same_bits(env, results)
    np.testing.assert_allclose(
        results[0], wanted, rtol=0, atol=error * abs(wanted).max()
    )


@algorithm_case(
    "Adasum is what its definition says, for each tensor of a bucket",
)
def adasum_is_what_its_definition_says(env: Env) -> dict:
    wanted = np.concatenate(definition.combined_each(members_of(env, 1)))
    exact = sum(flat(rank).astype("float64") for rank in range(env.num_replicas))
    assert abs(wanted - exact).max() > 0.1 * abs(exact).max(), "it is the sum"
    whole = definition.combined([flat(rank) for rank in range(env.num_replicas)])
    assert abs(wanted - whole).max() > 0.01 * abs(wanted).max(), "it is of all at once"
    group = new_group(env)
    check_definition(env, functools.partial(adasum, group=group), wanted, 1e-6)
    rounded = functools.partial(adasum, group=group, **BF16)
    check_definition(env, rounded, wanted, 2**-8 * 2 * env.num_replicas)
    return {}


@algorithm_case(
    "Adasum across nodes combines the sums of the nodes", quick_setup="six_devices"
)
def adasum_across_nodes_combines_the_sums_of_nodes(env: Env) -> dict:
    for node_size in node_sizes(env):
        wanted = np.concatenate(definition.combined_each(members_of(env, node_size)))
        group = new_group(env, node_size)
        combine = functools.partial(adasum_across_nodes, group=group)
        check_definition(env, combine, wanted, 1e-6)
    return {}


@case(
    "Adasum across nodes whose positions are mixed",
    setups=("eight_devices",),
    compare=False,
)
@same_as("adasum_across_nodes_combines_the_sums_of_nodes")
def adasum_across_nodes_in_any_order_of_positions(env: Env) -> dict:
    group = new_group(env)
    # As names of tasks are sorted: in each slice the nodes come in another order.
    group.nodes = ((0, 7), (6, 1), (2, 5), (4, 3))
    members = [
        [sum(parts) for parts in zip(own(first), own(second), strict=True)]
        for first, second in group.nodes
    ]
    wanted = np.concatenate(definition.combined_each(members))
    combine = functools.partial(adasum_across_nodes, group=group)
    check_definition(env, combine, wanted, 1e-6)
    return {}


def _combined(env: Env, value: typing.Callable[[int], np.ndarray]) -> list[np.ndarray]:
    """What the replicas get from gradients by rank, the same in two tensors."""
    group = new_group(env)

    def reduce(replica, rank):
        given = tf.constant(value(rank))
        both = tf.concat([given, 2.0 * given], axis=0)
        return adasum(both, group, replica, sizes=[given.shape[0]] * 2)

    first, second = np.split(run(env, reduce)[0], 2)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6, equal_nan=True)
    return first


@algorithm_case("orthogonal gradients add up, parallel ones average")
@same_as("adasum_is_what_its_definition_says")
def orthogonal_gradients_add_up_and_parallel_ones_average(env: Env) -> dict:
    size = env.num_replicas
    across = np.eye(size, dtype="float32")
    np.testing.assert_allclose(_combined(env, across.__getitem__), np.ones(size))
    same = np.float32([3.0, -1.0, 2.0])
    np.testing.assert_allclose(_combined(env, lambda rank: same), same, rtol=1e-6)
    # Squares of 1e-30 are nothing in float32, those of 1e30 infinite.
    for factor in (1e-30, 1e30):
        found = _combined(env, lambda rank, f=factor: same * np.float32(f))
        np.testing.assert_allclose(found, same * factor, rtol=1e-6)
    # A replica without rows has zeros, and does not make the others' smaller.
    only = _combined(env, lambda rank: same * np.float32(rank == size - 1))
    np.testing.assert_allclose(only, same, rtol=1e-6)
    nothing = _combined(env, lambda rank: same * np.float32(0))
    np.testing.assert_array_equal(nothing, np.zeros(3))
    return {}


@algorithm_case("what is not finite on one replica is so for all, in its tensor only")
@same_as("adasum_is_what_its_definition_says")
def adasum_keeps_what_is_not_finite(env: Env) -> dict:
    group = new_group(env)
    for bad in (np.nan, np.inf, -np.inf):

        def reduce(replica, rank, bad=bad):
            value = flat(rank)
            if rank == env.num_replicas - 1:
                value[100] = bad
            return adasum(tf.constant(value), group, replica, sizes=SIZES)

        for result in run(env, reduce):
            parts = np.split(result, np.cumsum(SIZES)[:-1])
            finite = [bool(np.isfinite(part).all()) for part in parts]
            assert finite == [True, True, False, True, True, True]
    return {}


@case(
    "what Adasum launches and sends",
    setups=("eight_devices",),
    compare=False,
)
@same_as("adasum_is_what_its_definition_says")
def adasum_sends_halves_and_three_numbers_for_each_tensor(env: Env) -> dict:
    group = new_group(env, node_size=4)
    size = 4 * 1024
    sent = functools.partial(sent_by, env, group=group, length=1024)
    # Of two tensors and of padding, in float64.
    products = 3 * 3 * 8
    sizes = (1000, 24)
    assert sent(functools.partial(adasum, sizes=sizes)) == {
        "AllToAll": [size, size // 2, size // 4],
        "Reduce": [products] * 3,
        "Gather": [size // 8, size // 4, size // 2],
    }
    compressed = functools.partial(adasum, sizes=sizes, wire_dtype=tf.float16)
    assert sent(compressed)["AllToAll"] == [size // 2, size // 4, size // 8]
    assert sent(functools.partial(adasum_across_nodes, sizes=sizes)) == {
        "AllToAll": [size, size // 4],
        "Reduce": [products],
        "Gather": [size // 8, size // 4],
    }
    return {}
