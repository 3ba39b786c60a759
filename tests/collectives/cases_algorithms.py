"""All-reduce algorithms against plain sums, and the graphs that they make."""

from __future__ import annotations

import collections.abc
import functools
import itertools
import typing
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.collectives.cases_primitives import (
    all_data,
    by_tensorflow,
    check,
    data,
    is_by_tensorflow,
    run,
)
from tests.harness.env import Env
from tests.harness.registry import case
from tfdp.communication.collectives import (
    LaunchOrder,
    Level,
    ProcessGroup,
    TensorFlowTransport,
    algorithms,
    halving_doubling,
    hierarchical,
    ring,
    tree,
)

# 2, 3, 4, 6 and 8 replicas; in one process by TensorFlow, in two also by the transport
# of the strategy.
SETUPS = (
    *("mirrored", "three_devices", "six_devices", "eight_devices"),
    *("two_workers", "two_by_two"),
)
DTYPES = ("float32", "float16", "bfloat16", "int32")
# Empty, one, fewer than replicas, not divisible by a group, prime, and large.
LENGTHS = (0, 1, 3, 10, 1009, 100_003)
FLAT: dict[str, typing.Callable] = {
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
}
# Each inside nodes and each across them, with itself and with another.
LEVELS = (
    ("ring", "ring"),
    ("tree", "halving_doubling"),
    ("halving_doubling", "tree"),
    ("ring", "tree"),
)


def algorithm_case(
    covers: str, quick_setup: str = "", **options: typing.Any
) -> collections.abc.Callable:
    """Registers a case on all set-ups, and on one with TensorFlow's groups only."""
    # Eight replicas on two cores that others use are slow to trace.
    options |= {"compare": False, "deadline_seconds": 240.0}

    def add(function: typing.Callable) -> typing.Callable:
        case(covers, setups=SETUPS, quick_setup=quick_setup, **options)(function)
        others = by_tensorflow(function)
        case(covers, setups=("two_by_two_ring",), **options)(others)
        return function

    return add


def new_group(env: Env, node_size: int = 1, num_channels: int = 4) -> ProcessGroup:
    """All replicas, as nodes of some neighbours each, in a launch order of its own."""
    extended = env.strategy.extended
    order = LaunchOrder(extended.worker_devices, num_channels)
    ranks = range(env.num_replicas)
    nodes = tuple(
        tuple(ranks[first : first + node_size])
        for first in range(0, env.num_replicas if node_size > 1 else 0, node_size)
    )
    is_own = env.setup.is_multi_worker and not is_by_tensorflow()
    return ProcessGroup(
        order,
        env.num_replicas,
        extended.group.transport if is_own else TensorFlowTransport(),
        positions=extended.group.local_positions,
        nodes=nodes,
        workers=extended.group.workers,
    )


def in_nodes(**levels: Level) -> collections.abc.Callable:
    return functools.partial(hierarchical, **levels)


def node_sizes(env: Env) -> list[int]:
    """Into nodes of how many the replicas can be divided."""
    return [n for n in range(2, env.num_replicas) if env.num_replicas % n == 0]


def ready_made(env: Env) -> list[tuple[ProcessGroup, collections.abc.Callable]]:
    """Every algorithm with a group for it: each pair of levels in each size."""
    flat = new_group(env)
    found: list = [(flat, algorithm) for algorithm in FLAT.values()]
    for node_size in node_sizes(env):
        group = new_group(env, node_size)
        for inner, outer in LEVELS:
            found.append((group, in_nodes(inner=Level(inner), outer=Level(outer))))
    return found


@algorithm_case("every algorithm adds tensors of every dtype and length")
def algorithms_add_every_dtype_and_length(env: Env) -> dict:
    everything = [(d, 10) for d in DTYPES]
    everything += [("float32", n) for n in LENGTHS]
    # Levels are made of the flat ones, which have been through every dtype.
    some = [("float16", 10), ("int32", 10), ("float32", 0), ("float32", 1009)]
    for group, algorithm in ready_made(env):
        is_flat = algorithm in FLAT.values()
        wanted = everything if is_flat else some

        def reduce(replica, rank, group=group, algorithm=algorithm, wanted=wanted):
            return [
                algorithm(tf.constant(data(rank, (n,), d)), group, replica, channel=i)
                for i, (d, n) in enumerate(wanted)
            ]

        for results in run(env, reduce):
            for (dtype, length), result in zip(wanted, results, strict=True):
                total = sum(all_data(env, (length,), dtype))
                check([result], total.astype(tf.as_dtype(dtype).as_numpy_dtype))
    return {}


@algorithm_case("every algorithm gives all replicas the same bits, close to the sum")
def algorithms_give_the_same_bits(env: Env) -> dict:
    length = 1009

    def own(rank: int) -> np.ndarray:
        return np.random.default_rng(rank).normal(size=length).astype("float32")

    total = sum(own(rank).astype("float64") for rank in range(env.num_replicas))
    for group, algorithm in ready_made(env):
        wire_dtypes = [{}] if isinstance(algorithm, functools.partial) else [{}, BF16]
        for wire_dtype in wire_dtypes:

            def reduce(
                replica,
                rank,
                group=group,
                algorithm=algorithm,
                wire_dtype=wire_dtype,
            ):
                return algorithm(tf.constant(own(rank)), group, replica, **wire_dtype)

            results = run(env, reduce)
            check_same_bits(env, results)
            # bfloat16 keeps 8 bits: of each of N addends, and of the sum.
            error = 2**-8 * (env.num_replicas + 1) if wire_dtype else 1e-6
            assert np.abs(results[0] - total).max() <= error * np.abs(total).max()
    return {}


BF16 = {"wire_dtype": tf.bfloat16}


def check_same_bits(env: Env, results: list) -> None:
    """On all workers: the sums of bits are those of one, times their number."""
    group = new_group(env)
    bits = [np.frombuffer(result.tobytes(), "int32") for result in results]
    bits = [part % 1000 for part in bits]

    def add(replica, rank):
        del rank
        return ring(tf.constant(bits[replica]), group, replica)

    check(run(env, add), bits[0] * np.int32(env.num_replicas))


@algorithm_case("algorithms inside loops and conditionals of a traced function")
def algorithms_in_loops_and_conditionals(env: Env) -> dict:
    node_size = next(iter(node_sizes(env)), 1)
    group = new_group(env, node_size)
    algorithms = [*FLAT.values(), *([in_nodes()] if node_size > 1 else [])]
    rounds = 3

    def one(algorithm, values):
        return [
            algorithm(value, group, replica) for replica, value in enumerate(values)
        ]

    for algorithm in algorithms:

        @tf.function(autograph=False)
        def step(values, algorithm=algorithm):
            def body(i, *values):
                sums = tf.cond(
                    i % 2 == 0,
                    lambda: one(algorithm, values),
                    lambda: [v * float(env.num_replicas) for v in values],
                )
                return (i + 1, *sums)

            return tf.while_loop(lambda i, *_: i < rounds, body, (0, *values))[1:]

        extended = env.strategy.extended
        ranks = [extended.first_rank + r for r in range(extended.num_local)]
        own = [tf.constant(data(rank, (10,))) for rank in ranks]
        total = sum(all_data(env, (10,))) * env.num_replicas**2
        check([np.asarray(v) for v in step(own)], total.astype("float32"))
    return {}


@case(
    "algorithms keep one launch order on every replica",
    setups=("eight_devices",),
    compare=False,
)
def algorithms_keep_one_launch_order_on_every_replica(env: Env) -> dict:
    group = new_group(env, node_size=2, num_channels=1)
    algorithms = [ring, tree, halving_doubling, in_nodes(), in_nodes(outer=_TREE)]

    @tf.function(autograph=False)
    def step():
        return [
            [
                algorithm(tf.fill([64], float(replica)), group, replica)
                for algorithm in algorithms
            ]
            for replica in range(env.num_replicas)
        ]

    graph = step.get_concrete_function().graph
    launched = {device: [] for device in group.devices}
    for operation in graph.get_operations():
        if operation.type.startswith("Collective"):
            launched[operation.device].append(operation)
    for operations in launched.values():
        assert len(operations) >= len(algorithms)
        for before, after in itertools.pairwise(operations):
            assert _waits_for(after, before), (before.name, after.name)
    keys = {d: [_group_key(op) for op in ops] for d, ops in launched.items()}
    for one, other in itertools.combinations(keys.values(), 2):
        shared = set(one) & set(other)
        assert shared  # the group of all, at least
        assert [k for k in one if k in shared] == [k for k in other if k in shared]
    return {}


_TREE = Level("tree")


def _waits_for(operation: tf.Operation, wanted: tf.Operation) -> bool:
    seen, waiting = set(), [operation]
    while waiting:
        current = waiting.pop()
        before = [tensor.op for tensor in current.inputs] + current.control_inputs
        if wanted in before:
            return True
        fresh = [op for op in before if op.name not in seen]
        seen.update(op.name for op in fresh)
        waiting.extend(fresh)
    return False


def _group_key(operation: tf.Operation) -> int:
    position = 2 if "Recv" not in operation.type else 1
    return int(tf.get_static_value(operation.inputs[position]))


def sent_by(env: Env, algorithm, group: ProcessGroup, length: int) -> dict:
    """Number of collectives and bytes of their inputs, on the first replica."""

    @tf.function(autograph=False)
    def step():
        return [
            algorithm(tf.fill([length], 1.0), group, replica)
            for replica in range(env.strategy.extended.num_local)
        ]

    found: dict = {}
    for operation in step.get_concrete_function().graph.get_operations():
        is_collective = operation.type.startswith("Collective")
        if is_collective and operation.device == group.devices[0]:
            kind = operation.type.removeprefix("Collective").removesuffix("V2")
            value = operation.outputs[0]
            if operation.type != "CollectiveBcastRecvV2":
                value = operation.inputs[0]
            size = value.shape.num_elements() * value.dtype.size
            found.setdefault(kind, []).append(size)
    return found


@case(
    "what algorithms launch and send",
    setups=("eight_devices",),
    compare=False,
)
def algorithms_launch_so_many_collectives_of_so_many_bytes(env: Env) -> dict:
    group = new_group(env, node_size=4)
    size = 4 * 1024
    sent = functools.partial(sent_by, env, group=group, length=1024)
    assert sent(ring) == {"Reduce": [size]}
    # Three times up to the first replica and three times down from it.
    assert sent(tree) == {"BcastRecv": [size] * 3, "BcastSend": [size] * 3}
    halves = [size, size // 2, size // 4]
    assert sent(halving_doubling) == {
        "AllToAll": halves,
        "Gather": [size // 8, size // 4, size // 2],
    }
    nodes = {"AllToAll": [size], "Reduce": [size // 4], "Gather": [size // 4]}
    assert sent(in_nodes()) == nodes
    compressed = in_nodes(outer=Level("ring", tf.bfloat16))
    assert sent(compressed) == {
        "AllToAll": [size, size // 8],
        "Gather": [size // 16, size // 4],
    }
    everywhere = functools.partial(ring, wire_dtype=tf.float16)
    assert sent(everywhere) == {"AllToAll": [size // 2], "Gather": [size // 16]}
    return {}


@case("sums that the transport rounds", compare=False)
def sums_that_the_transport_rounds_are_those_of_each_level(env: Env) -> dict:
    size = env.num_replicas
    flat, nodes = new_group(env), new_group(env)
    nodes.nodes = tuple((rank,) for rank in range(size))
    level = Level("ring", tf.bfloat16)

    def reduce(replica, rank):
        value = tf.constant(np.random.default_rng(rank).normal(size=1009), tf.float32)
        return [
            ring(value, flat, replica, wire_dtype=tf.bfloat16),
            hierarchical(value, nodes, replica, inner=level, outer=level),
        ]

    found = run(env, reduce)
    by_transport = algorithms._rounds_sums_once(flat)
    assert by_transport == (env.setup.is_multi_worker and size == env.setup.num_workers)
    with mock.patch.object(algorithms, "_rounds_sums_once", return_value=False):
        expected = run(env, reduce)
    np.testing.assert_array_equal(found, expected)
    return {}


@case("compressed sums", compare=False)
def compressed_sums_are_rounded_once_and_overflow_to_infinity(env: Env) -> dict:
    group = new_group(env)
    # In bfloat16, 256 + 1 is 256: a sum of many would stand still.
    value = np.float32([256.0, 1.0, 65_000.0])

    def reduce(replica, rank):
        own = tf.constant(value) if rank == 0 else tf.constant([1.0, 1.0, 65_000.0])
        return [
            ring(own, group, replica, wire_dtype=tf.bfloat16),
            ring(own, group, replica, wire_dtype=tf.float16),
        ]

    others = env.num_replicas - 1
    for in_bfloat16, in_float16 in run(env, reduce):
        assert in_bfloat16[0] == np.float32(tf.cast(256.0 + others, tf.bfloat16))
        assert in_bfloat16[1] == in_float16[1] == env.num_replicas
        assert np.isfinite(in_bfloat16[2])
        assert np.isinf(in_float16[2])
    return {}


@case(
    "groups of some replicas",
    setups=("eight_devices",),
    compare=False,
)
def groups_of_some_replicas_reduce_by_themselves(env: Env) -> dict:
    group = new_group(env)
    parts = ((0, 3), (5, 1, 2), (7,))
    groups = group.split(parts)
    assert groups is group.split(parts)
    assert groups[4] is None
    assert [g.size if g else 0 for g in groups] == [2, 3, 3, 2, 0, 3, 0, 1]

    def reduce(replica, rank):
        if groups[replica] is None:
            return tf.zeros([5])
        return ring(tf.constant(data(rank, (5,))), groups[replica], replica)

    expected = {rank: np.zeros(5, "float32") for rank in range(8)}
    for part in parts:
        for rank in part:
            expected[rank] = sum(data(member, (5,)) for member in part)
    check(run(env, reduce), expected.get)
    with pytest.raises(ValueError, match="at most once"):
        group.split(((0, 1), (1, 2)))
    with pytest.raises(ValueError, match="at most once"):
        group.split(((0, 8),))
    return {}
