"""Every all-reduce algorithm and dtype by NCCL; with one GPU, groups of one."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tfdp.communication.collectives import (
    Level,
    ProcessGroup,
    halving_doubling,
    hierarchical,
    ring,
    tree,
)

GPUS = [f"GPU:{i}" for i in range(len(tf.config.list_physical_devices("GPU")))]

pytestmark = pytest.mark.skipif(not GPUS, reason="there is no GPU on this machine")

FLAT = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}
DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.int32)
LENGTHS = (0, 1, 7, 1009, 100_003)
COUNTS = range(1, len(GPUS) + 1) or [1]


def new_group(count: int, node_size: int = 1) -> ProcessGroup:
    """A group of some GPUs, as nodes of so many each."""
    strategy = tfdp.MirroredStrategy(GPUS[:count])
    order = strategy.extended.group.launch_order
    ranks = tuple(range(count))
    firsts = range(0, count, node_size)
    nodes = tuple(ranks[first : first + node_size] for first in firsts)
    return ProcessGroup(order, count, strategy.extended.group.transport, nodes=nodes)


def check(algorithm, group: ProcessGroup, dtype: tf.DType) -> None:
    """Whole numbers add up exactly, on every GPU."""

    @tf.function(autograph=False)
    def step():
        results = []
        for replica, device in enumerate(group.devices):
            with tf.device(device):
                values = [tf.fill([n], tf.cast(replica + 1, dtype)) for n in LENGTHS]
                results.append([algorithm(v, group, replica) for v in values])
        return results

    total = sum(range(1, group.size + 1))
    for results in step():
        for length, result in zip(LENGTHS, results, strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(
                tf.cast(result, tf.float32).numpy(), np.full(length, float(total))
            )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FLAT)
def test_flat_algorithm_adds_over_gpus(name, dtype, count):
    check(FLAT[name], new_group(count), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("inner", FLAT)
@pytest.mark.parametrize("outer", FLAT)
def test_hierarchical_algorithm_adds_over_gpus(inner, outer, dtype):
    levels = {"inner": Level(inner), "outer": Level(outer)}
    algorithm = functools.partial(hierarchical, **levels)
    for count, node_size in itertools.product(COUNTS, COUNTS):
        if count % node_size == 0:
            check(algorithm, new_group(count, node_size), dtype)


@pytest.mark.parametrize("wire_dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", FLAT)
def test_compressed_sums_over_gpus(name, wire_dtype):
    for count in COUNTS:
        algorithm = functools.partial(FLAT[name], wire_dtype=wire_dtype)
        check(algorithm, new_group(count), tf.float32)
