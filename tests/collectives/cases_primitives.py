"""The primitives of `tfdp.communication.collectives`, against sums and joins made by
NumPy.

Every replica's tensor is a function of its rank, so each process knows what all
the others hold.
"""

from __future__ import annotations

import collections.abc
import contextvars
import functools
import gc
import itertools
import threading
import typing

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness.env import Env
from tests.harness.registry import ALL, case, same_as
from tfdp.communication.collectives import (
    LaunchOrder,
    Member,
    ProcessGroup,
    ProcessTransport,
    TensorFlowTransport,
    Transport,
    is_collective,
    padded_length,
    timing,
)
from tfdp.communication.collectives.instance_keys import SIZES
from tfdp.communication.coordination.flight_steps import traced_collectives
from tfdp.communication.coordination.progress import progress

SETUPS = (*ALL, "three_devices")
REDUCED = ("float16", "float32", "float64", "int32", "int64", "bfloat16")
GATHERED = ("float16", "float32", "float64", "int32", "int64")
# Empty, one, fewer than a ring has pieces, prime, round, and larger than a message.
LENGTHS = (0, 1, 2, 7, 16, 1009, 4096, 300_007)
ROWS = (1, 3, 5, 257)

Fn = collections.abc.Callable[[int, int], typing.Any]
# Whether the groups of a case are TensorFlow's, and not those of the strategy.
_by_tensorflow = contextvars.ContextVar("by_tensorflow", default=False)


def by_tensorflow(function: typing.Callable) -> typing.Callable:
    """The same case with groups of TensorFlow's, under a name of its own."""

    @functools.wraps(function)
    def run_by_tensorflow(env: Env) -> dict:
        token = _by_tensorflow.set(True)
        try:
            return function(env)
        finally:
            _by_tensorflow.reset(token)

    run_by_tensorflow.__name__ += "_by_tensorflow"
    left_out = vars(function).get("left_out", {"same_as": function.__name__})
    return same_as(left_out["same_as"])(run_by_tensorflow)


def collective_case(covers: str, quick_setup: str = "") -> collections.abc.Callable:
    """Registers a case over the strategy's transport, and over TensorFlow's."""

    def add(function: typing.Callable) -> typing.Callable:
        case(covers, setups=SETUPS, compare=False, quick_setup=quick_setup)(function)
        setups = "mirrored", "two_by_two_ring"
        case(covers, setups=setups, compare=False)(by_tensorflow(function))
        return function

    return add


def is_by_tensorflow() -> bool:
    """Whether the groups of this case are TensorFlow's."""
    return _by_tensorflow.get()


def new_group(
    env: Env, order: LaunchOrder | None = None, transport: Transport | None = None
) -> ProcessGroup:
    """A group of all replicas, with a launch order of its own unless one is given."""
    extended = env.strategy.extended
    if transport is None:
        transport = TensorFlowTransport() if is_by_tensorflow() else _transport(env)
    return ProcessGroup(
        order or LaunchOrder(extended.worker_devices, num_channels=4),
        env.num_replicas,
        transport,
        positions=extended.group.local_positions,
        workers=extended.group.workers,
    )


def _transport(env: Env) -> Transport:
    """The strategy's transport, and between devices the one between processes, too."""
    if env.setup.is_multi_worker:
        transport = env.strategy.extended.group.transport
        assert transport.name == ("mpi" if env.setup.is_mpi else "direct")
        return transport
    return ProcessTransport("direct", 0, None)


def rank_of(env: Env, replica: int) -> int:
    """The rank of a local replica."""
    return env.strategy.extended.first_rank + replica


def each_replica(env: Env, fn: Fn) -> list:
    """Calls `fn(replica, rank)` for each local replica, on its device."""
    results = []
    for replica, device in enumerate(env.strategy.extended.worker_devices):
        with tf.device(device):
            results.append(fn(replica, rank_of(env, replica)))
    return results


def run(env: Env, fn: Fn) -> list:
    """The same in one traced function; returns the local results as arrays."""
    traced = tf.function(lambda: each_replica(env, fn), autograph=False)
    return tf.nest.map_structure(np.asarray, traced())


def run_eagerly(env: Env, fn: Fn) -> list:
    """The same eagerly, every local replica in a thread of its own."""
    devices = env.strategy.extended.worker_devices
    results: list = [None] * len(devices)

    def work(replica: int) -> None:
        with tf.device(devices[replica]):
            results[replica] = np.asarray(fn(replica, rank_of(env, replica)))

    threads = [
        threading.Thread(target=work, args=(replica,))
        for replica in range(len(devices))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def data(rank: int, shape: tuple, dtype: str = "float32", salt: int = 0) -> np.ndarray:
    """Small whole numbers that depend on the rank: their sums are exact."""
    rng = np.random.default_rng((rank, salt, *shape))
    return rng.integers(-9, 10, shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def all_data(env: Env, *args: typing.Any, **kwargs: typing.Any) -> list[np.ndarray]:
    """What the replicas hold, by rank."""
    return [data(rank, *args, **kwargs) for rank in range(env.num_replicas)]


def check(results: list, expected: typing.Any) -> None:
    """Every local replica has exactly what is expected, type and shape too."""
    for replica, result in enumerate(results):
        want = expected(replica) if callable(expected) else expected
        assert result.dtype == want.dtype
        np.testing.assert_array_equal(result, want, f"on local replica {replica}")


@collective_case("all-reduce adds tensors of every dtype and length")
def all_reduce_adds_every_dtype_and_length(env: Env) -> dict:
    group = new_group(env)
    wanted = [(d, n) for d in REDUCED for n in (LENGTHS if d == "float32" else (0, 7))]

    def reduce(replica, rank):
        return [
            Member(group, replica, channel=i).all_reduce(
                tf.constant(data(rank, (n,), d))
            )
            for i, (d, n) in enumerate(wanted)
        ]

    for results in run(env, reduce):
        for (dtype, length), result in zip(wanted, results, strict=True):
            check([result], sum(all_data(env, (length,), dtype)).astype(result.dtype))
            assert result.dtype == tf.as_dtype(dtype)
    return {}


@collective_case("all-reduce keeps the shape of tensors of any rank", "two_by_two")
def all_reduce_keeps_the_shape(env: Env) -> dict:
    group = new_group(env)
    for shape in [(), (3,), (2, 3), (5, 1, 2), (2, 0, 3)]:
        results = run(
            env,
            lambda r, k, s=shape: Member(group, r).all_reduce(tf.constant(data(k, s))),
        )
        check(results, sum(all_data(env, shape)))
    return {}


@collective_case("all-gather joins rows by rank, for every dtype and length")
def all_gather_joins_by_rank(env: Env) -> dict:
    group = new_group(env)
    wanted = [(d, n) for d in GATHERED for n in ((0, *ROWS) if d == "int32" else (3,))]

    def gather(replica, rank):
        return [
            Member(group, replica, channel=i).all_gather(
                tf.constant(data(rank, (n, 2), d))
            )
            for i, (d, n) in enumerate(wanted)
        ]

    for results in run(env, gather):
        for (dtype, rows), result in zip(wanted, results, strict=True):
            check([result], np.concatenate(all_data(env, (rows, 2), dtype)))
    return {}


@collective_case("all-to-all sends the i-th slice to replica i", "two_workers")
def all_to_all_sends_slices(env: Env) -> dict:
    group, size = new_group(env), env.num_replicas
    for dtype in GATHERED:
        for rows in (0, 1, 5) if dtype == "float32" else (3,):
            shape = (size, rows, 2)
            results = run(
                env,
                lambda r, k, s=shape, d=dtype: Member(group, r).all_to_all(
                    tf.constant(data(k, s, d))
                ),
            )
            stacked = np.stack(all_data(env, shape, dtype))
            check(results, lambda r, s=stacked: s[:, rank_of(env, r)])
    return {}


@collective_case("reduce-scatter keeps the replica's slice of the sum")
def reduce_scatter_keeps_the_slice_of_the_sum(env: Env) -> dict:
    group, size = new_group(env), env.num_replicas
    for dtype in GATHERED:
        for rows in (0, *ROWS) if dtype == "float32" else (3,):
            shape = (size * rows, 2)
            results = run(
                env,
                lambda r, k, s=shape, d=dtype: Member(group, r).reduce_scatter(
                    tf.constant(data(k, s, d))
                ),
            )
            total = sum(all_data(env, shape, dtype))
            slices = np.split(total, size)
            check(results, lambda r, s=slices: s[rank_of(env, r)])
    return {}


def _exchanges(env: Env, transport: Transport) -> None:
    """All-to-all and reduce-scatter of float32, and of bfloat16 by its bits."""
    group, size = new_group(env, transport=transport), env.num_replicas
    shape = (size, 3)

    def exchange(replica: int, rank: int) -> tuple:
        member = Member(group, replica)
        received = member.all_to_all(tf.constant(data(rank, shape)))
        halves = member.all_to_all(tf.cast(data(rank, shape), tf.bfloat16))
        summed = member.all_reduce(tf.cast(data(rank, shape), tf.bfloat16))
        return received, tf.cast(halves, tf.float32), tf.cast(summed, tf.float32)

    stacked = np.stack(all_data(env, shape))
    halves = tf.cast(tf.cast(stacked, tf.bfloat16), tf.float32).numpy()
    for replica, (received, half, summed) in enumerate(run(env, exchange)):
        rank = rank_of(env, replica)
        np.testing.assert_array_equal(received, stacked[:, rank])
        np.testing.assert_array_equal(half, halves[:, rank])
        np.testing.assert_allclose(summed, halves.sum(axis=0), rtol=0.02, atol=0.05)


@case(
    "From twelve members on TensorFlow's all-to-all mixes up messages, and ten follows "
    "nine in its order of devices",
    setups=("twelve_devices",),
    compare=False,
)
def exchanges_between_twelve_devices(env: Env) -> dict:
    _exchanges(env, TensorFlowTransport())
    return by_tensorflow(reduce_scatter_keeps_the_slice_of_the_sum)(env)


@case(
    "Between processes TensorFlow's NCCL has no all-to-all, and nowhere bfloat16",
    setups=("mirrored", "two_by_two_ring"),
    quick_setup="two_by_two_ring",
    compare=False,
)
def exchanges_of_nccl_between_processes(env: Env) -> dict:
    # Between CPUs TensorFlow runs its ring, whatever the hint.
    transport = TensorFlowTransport("nccl")
    _exchanges(env, transport)
    group = new_group(env, transport=transport)

    def exchange() -> list:
        value = tf.zeros((env.num_replicas, 2), tf.bfloat16)
        return each_replica(env, lambda r, _: Member(group, r).all_to_all(value))

    traced = tf.function(exchange, autograph=False).get_concrete_function()
    kinds = {op.type for op in traced.graph.get_operations()}
    assert ("CollectiveAllToAllV2" in kinds) == (not env.setup.is_multi_worker)
    assert ("CollectiveGatherV2" in kinds) == env.setup.is_multi_worker
    sent = [op for op in traced.graph.get_operations() if is_collective(op)]
    assert {op.inputs[0].dtype for op in sent} == {tf.float16}
    # The groups of each other replica, created in a trace.
    parts = [list(range(first, env.num_replicas, 2)) for first in range(2)]

    def sum_of_part(replica: int, rank: int) -> tf.Tensor:
        return (
            Member(group, replica)
            .inside(group.split(parts))
            .all_reduce(tf.constant(rank))
        )

    sums = run(env, sum_of_part)
    check(sums, lambda r: np.int32(sum(parts[rank_of(env, r) % 2])))
    return {}


@case(
    "NCCL orders the GPUs of a process by their links",
    setups=("mirrored", "two_by_two_ring"),
    compare=False,
)
@same_as("exchanges_of_nccl_between_processes")
def positions_are_those_of_the_transport(env: Env) -> dict:
    class Reversed(TensorFlowTransport):
        def run(self, kind: str, tensor: tf.Tensor, *args: typing.Any) -> tf.Tensor:
            result = super().run(kind, tensor, *args)
            return result[::-1] if kind == "all_gather" else result

    group, size = new_group(env, transport=Reversed("nccl")), env.num_replicas
    for replica in range(len(group.devices)):
        assert group.position(replica) == size - 1 - rank_of(env, replica)
    return {}


@collective_case("broadcast gives everybody the source's tensor")
def broadcast_gives_the_tensor_of_any_source(env: Env) -> dict:
    group = new_group(env)
    for source in range(env.num_replicas):
        for dtype in ("float32", "int32", "bool", "float16"):
            for shape in [(), (7,), (0,), (2, 3)]:
                results = run(
                    env,
                    lambda r, k, s=shape, d=dtype, src=source: Member(
                        group, r
                    ).broadcast(tf.constant(data(k, s, d)), source=src),
                )
                check(results, data(source, shape, dtype))
    return {}


@collective_case("collectives of a length known only at run time")
def lengths_known_only_at_run_time(env: Env) -> dict:
    group = new_group(env)
    specs = [tf.TensorSpec([None], "float32")] * env.setup.devices_per_worker

    @tf.function(input_signature=specs, autograph=False)
    def step(*tensors):
        def work(replica, _):
            flat = tensors[replica]
            padded, size = padded_length(tf.size(flat))
            sent = tf.pad(flat, [[0, padded - tf.size(flat)]])
            total = Member(group, replica).all_reduce(sent, size=size)
            joined = Member(group, replica).all_gather(sent, size=size)
            return total[: tf.size(flat)], joined

        return each_replica(env, work)

    # Lengths that share a size, that do not, and the first once more.
    for length in (1, 17, 18, 0, 1000, 1009, 17):
        held = all_data(env, (length,))
        results = step(*each_replica(env, lambda _, k, h=held: tf.constant(h[k])))
        padded = int(padded_length(tf.constant(length))[0])
        rows = [np.pad(tensor, [0, padded - length]) for tensor in held]
        check([np.asarray(total) for total, _ in results], sum(held))
        check([np.asarray(joined) for _, joined in results], np.concatenate(rows))
    assert step.experimental_get_tracing_count() == 1
    return {}


@collective_case("collectives inside tf.while_loop, between others")
def collectives_in_a_while_loop(env: Env) -> dict:
    group, turns = new_group(env), 5

    @tf.function(autograph=False)
    def step():
        def turn(i, *values):
            def work(replica, _):
                total = Member(group, replica).all_reduce(values[replica])
                rows = Member(group, replica).all_gather(total[tf.newaxis])
                return tf.reduce_mean(rows, 0) / env.num_replicas + 1.0

            return i + 1, *each_replica(env, work)

        first = each_replica(
            env, lambda r, k: Member(group, r).all_reduce(tf.constant(data(k, (7,))))
        )
        # One loop of all replicas: TensorFlow tells collectives in loops of
        # different names apart, so that replicas would never meet.
        _, *last = tf.while_loop(lambda i, *_: i < turns, turn, [0, *first])
        return each_replica(env, lambda r, _: Member(group, r).all_reduce(last[r]))

    expected = (sum(all_data(env, (7,))) + turns) * env.num_replicas
    check([np.asarray(r) for r in step()], expected.astype("float32"))
    return {}


@collective_case("collectives inside tf.cond, both branches, one after the other")
def collectives_in_a_conditional(env: Env) -> dict:
    group = new_group(env)

    @tf.function(autograph=False)
    def step(flag):
        def work(replica, rank):
            value = tf.constant(data(rank, (7,)))
            chosen = tf.cond(
                flag,
                lambda: Member(group, replica).all_reduce(value),
                lambda: tf.reduce_sum(
                    Member(group, replica).all_gather(2 * value[tf.newaxis]), 0
                ),
            )
            return Member(group, replica).all_reduce(chosen)

        return each_replica(env, work)

    total = sum(all_data(env, (7,)))
    for flag in (True, False, True):
        results = [np.asarray(r) for r in step(tf.constant(flag))]
        check(results, total * env.num_replicas * (1 if flag else 2))
    return {}


@collective_case("a conditional inside a loop, as an accumulated step has")
def collectives_in_a_conditional_in_a_loop(env: Env) -> dict:
    group = new_group(env)

    @tf.function(autograph=False)
    def step():
        values = each_replica(env, lambda _, k: tf.constant(data(k, (3,))))

        def turn(i, *totals):
            def work(replica, _):
                return tf.cond(
                    tf.equal(i % 2, 0),
                    lambda: (
                        totals[replica]
                        + Member(group, replica).all_reduce(values[replica])
                    ),
                    lambda: totals[replica],
                )

            return i + 1, *each_replica(env, work)

        zeros = [tf.zeros_like(value) for value in values]
        _, *totals = tf.while_loop(lambda i, *_: i < 6, turn, [0, *zeros])
        return totals

    check([np.asarray(r) for r in step()], 3 * sum(all_data(env, (3,))))
    return {}


@collective_case("inner tf.functions, called several times", "three_devices")
def collectives_in_inner_functions(env: Env) -> dict:
    group = new_group(env)

    def work(replica, rank):
        inner = tf.function(
            lambda value: Member(group, replica).all_reduce(value), autograph=False
        )
        once = inner(tf.constant(data(rank, (5,))))
        return inner(once) + inner(once)

    check(run(env, work), 2 * env.num_replicas * sum(all_data(env, (5,))))
    return {}


@collective_case("the same function traced again, with other shapes and dtypes")
def function_traced_again_with_another_shape(env: Env) -> dict:
    group = new_group(env)
    step = tf.function(
        lambda tensors: each_replica(
            env,
            lambda r, _: (
                Member(group, r).all_reduce(tensors[r]),
                Member(group, r).all_gather(tensors[r]),
            ),
        ),
        autograph=False,
    )
    # The third and the fifth are those of the first again.
    calls = [((4,), "float32"), ((9,), "float32"), ((4,), "float32")]
    calls += [((4,), "float64"), ((4,), "float32"), ((2, 2), "float32")]
    for turn, (shape, dtype) in enumerate(calls):
        held = all_data(env, shape, dtype, salt=turn)
        results = step(each_replica(env, lambda _, k, h=held: tf.constant(h[k])))
        check([np.asarray(total) for total, _ in results], sum(held))
        check([np.asarray(rows) for _, rows in results], np.concatenate(held))
    assert step.experimental_get_tracing_count() == 4
    return {}


@collective_case("workers of which one traces a function more often than another")
def one_worker_traces_more_often(env: Env) -> dict:
    group = new_group(env)

    def reduce(replica, rank):
        return Member(group, replica).all_reduce(tf.constant(data(rank, (6,))))

    step = tf.function(lambda: each_replica(env, reduce), autograph=False)
    for _ in range(2):
        check([np.asarray(r) for r in step()], sum(all_data(env, (6,))))
        if env.rank == 0:
            step = tf.function(step.python_function, autograph=False)
    return {}


@collective_case("two groups of one launch order, and two launch orders, at once")
def two_groups_and_two_launch_orders_at_once(env: Env) -> dict:
    order = LaunchOrder(env.strategy.extended.worker_devices, num_channels=2)
    first, second = (new_group(env, order) for _ in range(2))
    third = new_group(env)
    assert len({first.key, second.key, third.key}) == 3

    def work(replica, rank):
        values = [tf.constant(data(rank, (33,), salt=salt)) for salt in range(6)]
        groups = [first, second, third, third, second, first]
        # The same shapes all over: only the groups' keys tell them apart.
        return tf.stack(
            [
                Member(group, replica, channel=channel).all_reduce(value)
                for channel, (value, group) in enumerate(
                    zip(values, groups, strict=True)
                )
            ]
        )

    totals = [sum(all_data(env, (33,), salt=salt)) for salt in range(6)]
    for _ in range(3):
        check(run(env, work), np.stack(totals))
    return {}


@collective_case("two strategies of one process reduce in one function")
def two_strategies_reduce_in_one_function(env: Env) -> dict:
    both = [env.strategy, env.new_strategy()]
    groups = [strategy.extended.group for strategy in both]
    assert len({group.key for group in groups}) == 2

    @tf.function(autograph=False)
    def step():
        sums = []
        for salt, strategy in enumerate(both):

            def work(salt=salt):
                context = tf.distribute.get_replica_context()
                rank = context.replica_id_in_sync_group
                rows = tf.stack(all_data(env, (5,), salt=salt))
                return context.all_reduce("SUM", tf.gather(rows, rank))

            sums.append(strategy.experimental_local_results(strategy.run(work)))
        return sums

    for _ in range(2):
        for salt, results in enumerate(step()):
            total = sum(all_data(env, (5,), salt=salt))
            check([np.asarray(result) for result in results], total)
    return {}


@case(
    "nests and values reduced to a variable, and values gathered along any axis",
    setups=("mirrored", "two_workers"),
    compare=False,
)
def values_are_reduced_to_variables_and_gathered_along_axes(env: Env) -> dict:
    strategy, rows = env.strategy, np.stack(all_data(env, (2,)))
    one = tf.ones([1])
    with env.scope():
        variable = tf.Variable([0.0, 0.0])
    argument = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([1])
    )

    def work():
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.gather(rows, rank)

    def gather(argument):
        return tf.distribute.get_replica_context().all_gather(argument, axis=0)

    def step(argument):
        own = strategy.run(work)
        total = strategy.extended.reduce_to("SUM", own, variable)
        (mean,) = strategy.extended.batch_reduce_to("MEAN", [(own, variable)])
        for value in total, mean:
            strategy.extended.update(
                variable, lambda own, x: own.assign_add(x), args=(value,)
            )
        nest = strategy.reduce("SUM", {"a": own, "b": [own]}, axis=None)
        columns = strategy.run(lambda: work()[:, tf.newaxis])
        gathered = strategy.run(gather, args=(argument,))
        same = strategy.run(lambda: tfdp.all_gather(one))
        return (
            [nest["a"], nest["b"][0]],
            [
                *strategy.experimental_local_results(gathered),
                *strategy.experimental_local_results(same),
            ],
            [strategy.gather(columns, axis) for axis in (0, 1, -1)],
        )

    for axis in -3, 2:
        with pytest.raises(ValueError, match=rf"one of the 2 axes .* Received: {axis}"):
            strategy.gather(strategy.run(lambda: tf.ones([2, 1])), axis)
    for run in step, tf.function(step):
        variable.assign([0.0, 0.0])
        results = run(argument)
        sums, ones, gathered = [list(map(np.asarray, part)) for part in results]
        check([variable.numpy()], rows.sum(axis=0) + rows.mean(axis=0))
        check(sums, rows.sum(axis=0))
        check(ones, np.ones(env.num_replicas, np.float32))
        check(gathered[:1], rows.reshape(-1, 1))
        check(gathered[1:], rows.T)
    return {}


@collective_case("eager collectives, local replicas in threads")
def eager_collectives(env: Env) -> dict:
    group, size = new_group(env), env.num_replicas
    for length in (1, 7, 1, 300):
        held = all_data(env, (length,))
        results = run_eagerly(
            env, lambda r, k, h=held: Member(group, r).all_reduce(tf.constant(h[k]))
        )
        check(results, sum(held))
        results = run_eagerly(
            env, lambda r, k, h=held: Member(group, r).all_gather(tf.constant(h[k]))
        )
        check(results, np.concatenate(held))
        results = run_eagerly(
            env,
            lambda r, k, h=held: Member(group, r).broadcast(
                tf.constant(h[k]), source=size - 1
            ),
        )
        check(results, held[-1])
    return {}


@case(
    "channels are chains, in the same order on every replica",
    setups=("mirrored", "three_devices", "two_workers", "two_by_two"),
    compare=False,
)
def launch_order_is_the_same_on_every_replica(env: Env) -> dict:
    own = check_launch_order(env, _transport(env))
    return {"shapes": own + check_launch_order(env, TensorFlowTransport())}


def check_launch_order(env: Env, transport: Transport) -> list[int]:
    """The lengths of the chains, each of which has every third collective."""
    num_channels, num_collectives = 3, 10
    order = LaunchOrder(env.strategy.extended.worker_devices, num_channels)
    group = new_group(env, order, transport)

    def work(replica, rank):
        values = [tf.constant(data(rank, (4 + i,))) for i in range(num_collectives)]
        return [
            Member(group, replica, channel=channel % num_channels).all_reduce(value)
            for channel, value in enumerate(values)
        ]

    traced = tf.function(lambda: each_replica(env, work), autograph=False)
    chains = chains_of(traced.get_concrete_function().graph)
    assert len(chains) == env.setup.devices_per_worker * num_channels
    for begin, chain in enumerate(chains):
        lengths = [elements(op) - 4 for op in chain]
        first = begin % num_channels
        assert lengths == list(range(first, num_collectives, num_channels))
        for before, after in itertools.pairwise(chain):
            assert is_ordered(before, after)
    heads = [chain[0] for chain in chains]
    for one, other in itertools.permutations(heads, 2):
        assert not is_ordered(one, other), "channels overlap"
    return [len(chain) for chain in chains]


def chains_of(graph: tf.Graph) -> list[list[tf.Operation]]:
    """The all-reduces of a graph by the resource that orders them, as traced.

    It is the last input of all: the ordering token of TensorFlow's, and a queue of
    those that a thread runs.
    """
    chains: dict = {}
    for op in graph.get_operations():
        if is_collective(op):
            chains.setdefault(op.inputs[-1].ref(), []).append(op)
    return list(chains.values())


def elements(op: tf.Operation) -> int:
    """How many numbers of four bytes an all-reduce sums."""
    (length,) = op.inputs[0].shape
    return length // 4 if op.inputs[0].dtype == tf.uint8 else length


def is_ordered(before: tf.Operation, after: tf.Operation) -> bool:
    """Whether one operation runs only after another."""
    seen, queue = set(), [after]
    while queue:
        op = queue.pop()
        if op is before:
            return True
        if op.name in seen:
            continue
        seen.add(op.name)
        queue.extend([*op.control_inputs, *(tensor.op for tensor in op.inputs)])
    return False


@case("lengths that collectives are padded to", compare=False)
@same_as("collectives_in_inner_functions")
def padded_lengths_hold_the_length_and_waste_little(env: Env) -> dict:
    lengths = [*range(1, 2000), 10**6, 10**9 + 7]
    for length in lengths:
        padded, size = (int(x) for x in padded_length(tf.constant(length)))
        assert padded == SIZES[size] >= length
        assert padded - length <= length / 8
    assert int(padded_length(tf.constant(0))[0]) == 1
    assert len(SIZES) <= 256
    return {}


@case("the threads of a group end with it", compare=False)
def threads_end_with_their_group(env: Env) -> dict:
    threads = _threads_of_a_group(env)
    assert threads
    gc.collect()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive(), thread.name
    return {}


def _threads_of_a_group(env: Env) -> list[threading.Thread]:
    """Those of a group that nothing refers to any more."""
    group = new_group(env)
    results = run(
        env, lambda r, k: Member(group, r).all_reduce(tf.constant([float(k)]))
    )
    assert results == [[sum(range(env.num_replicas))]] * len(results)
    name = f"tfdp {group.key}/"
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


@case("a group of one replica", compare=False)
def group_of_one_replica_communicates_nothing(env: Env) -> dict:
    order = LaunchOrder(env.strategy.extended.worker_devices[:1])
    group = ProcessGroup(order, 1, TensorFlowTransport())
    value = tf.constant(data(0, (1, 3)))

    @tf.function(autograph=False)
    def step():
        return [
            Member(group, 0).all_reduce(value),
            Member(group, 0).all_gather(value),
            Member(group, 0).all_to_all(value),
            Member(group, 0).reduce_scatter(value),
            Member(group, 0).broadcast(value),
        ]

    operations = step.get_concrete_function().graph.get_operations()
    assert not [op for op in operations if op.type.startswith("Collective")]
    check([np.asarray(result) for result in step()], value.numpy())
    return {}


@case(
    "collectives of TensorFlow are registered once",
    setups=("mirrored", "two_workers"),
    quick_setup="two_workers",
    compare=False,
)
def collectives_of_tensorflow_are_registered_for_flight_records(env: Env) -> dict:
    order = LaunchOrder(env.strategy.extended.worker_devices)
    group = new_group(env, order, TensorFlowTransport())
    value, num_local = tf.constant(data(0, (4,))), len(order.devices)

    @tf.function(autograph=False)
    def step():
        members = [Member(group, replica) for replica in range(num_local)]
        with timing.labelled("bucket 0"):
            totals = [member.all_reduce(value) for member in members]
        return totals, [member.broadcast(value[:2]) for member in members]

    with progress.looping("this test"):
        graph = step.get_concrete_function().graph
    found = traced_collectives.describe("this test")
    # Nobody waits for the replicas of this process alone.
    between_workers = ("all_reduce 'bucket_0' and 1 more", 24)
    assert found == (between_workers if env.setup.num_workers > 1 else None)
    operations = [op.type for op in graph.get_operations()]
    assert (
        len([op for op in operations if op.startswith("Collective")]) == 2 * num_local
    )
    return {}


@case("a group asked for no channels", compare=False)
def launch_order_without_channels_is_refused(env: Env) -> dict:
    with pytest.raises(ValueError, match="Received: num_channels=0"):
        LaunchOrder(["CPU:0"], 0)
    return {}
