"""Arguments of compressors, and by which algorithm a bucket is compressed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.reduction.cases_selection import SLOW
from tfdp.compression import (
    BlockQuantized,
    Compressor,
    GradientBucket,
    PowerSGD,
    TopK,
)
from tfdp.ground.plans.buckets import Bucket, Entry
from tfdp.ground.plans.topology import Topology
from tfdp.training.compression.block_code import BlockCode
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (BlockQuantized, {"bits": 3}),
        (BlockQuantized, {"bits": True}),
        (BlockQuantized, {"block": 0}),
        (BlockQuantized, {"block": 100}),
        (BlockQuantized, {"stochastic": 1}),
        (PowerSGD, {"rank": 0}),
        (PowerSGD, {"rank": 1.5}),
        (PowerSGD, {"start_step": -1}),
        (TopK, {"ratio": 0.0}),
        (TopK, {"ratio": 1.01}),
        (TopK, {"ratio": "1"}),
        (TopK, {"momentum": 1.0}),
        (TopK, {"momentum": -0.1}),
    ],
)
def test_wrong_arguments_get_one_sentence(kind: type, arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"^`{name}` must be .*") as caught:
        kind(**arguments)
    assert str(caught.value).endswith(f". Received: {name}={value!r}")


@pytest.mark.parametrize(
    "compression",
    [
        "int4",
        3,
        ["int8"],
        BlockQuantized,
        {"outer": "int3"},
        {"inner": PowerSGD()},
        {"inner": "int8", "outer": PowerSGD()},
    ],
    ids=str,
)
def test_what_is_no_compression_is_refused(compression: Any):
    with pytest.raises(ValueError, match=re.escape("ompress")) as caught:
        tfdp.CommunicationOptions(compression=compression)
    assert "Received: " in str(caught.value)


def test_a_compressor_of_ones_own_shows_its_settings_to_other_workers():
    class Own(Compressor):
        def __init__(self, bits: int) -> None:
            self.bits = bits

    assert repr(Own(2)) == "Own(bits=2)"
    assert str(Own(2)) == "Own"


def node_of(num_nodes: int, node_size: int) -> Topology:
    firsts = range(0, num_nodes * node_size, node_size)
    return Topology(tuple(tuple(range(f, f + node_size)) for f in firsts))


def bucket_of(*shapes: tuple[int, ...]) -> Bucket:
    entries = tuple(
        Entry(f"v{number}", shape, "float32", 4) for number, shape in enumerate(shapes)
    )
    return Bucket(tuple(range(len(entries))), entries, "float32")


def choice_of(bucket: Bucket, topology: Topology, **options: Any) -> str:
    chosen = tfdp.CommunicationOptions(links=SLOW, **options)
    selector = AlgorithmSelector(chosen, topology, "ring", warn=False)
    return str(selector.select(bucket.num_bytes, bucket.dtype, bucket=bucket))


LARGE = bucket_of((1000, 1000))
OUTER_INT8 = {"outer": "int8"}


@pytest.mark.parametrize(
    ("topology", "options", "wanted"),
    [
        ((1, 4), {"compression": "int8"}, "ring, int8"),
        ((1, 4), {"compression": "int8", "algorithm": "tree"}, "ring, int8"),
        ((2, 2), {"compression": "int8"}, "hierarchical (ring, ring), int8"),
        (
            (2, 2),
            {"compression": OUTER_INT8},
            "hierarchical (ring, ring), int8 across nodes",
        ),
        (
            (2, 2),
            {"compression": {"inner": "bf16", "outer": BlockQuantized(bits=4)}},
            "hierarchical (ring, ring), bfloat16 inside nodes, int4 across nodes",
        ),
        # A ring cannot compress across nodes only.
        ((2, 2), {"compression": OUTER_INT8, "algorithm": "ring"}, "ring"),
        ((4, 1), {"compression": OUTER_INT8}, "ring, int8"),
        ((4, 1), {"compression": {"outer": "bf16"}}, "ring, bfloat16"),
        ((1, 4), {"compression": OUTER_INT8}, "ring"),
        (
            (2, 2),
            {"compression": PowerSGD(), "algorithm": "tree"},
            "tree, PowerSGD of rank 4",
        ),
        (
            (2, 2),
            {"compression": {"outer": PowerSGD(rank=2)}},
            "hierarchical (ring, ring), PowerSGD of rank 2 across nodes",
        ),
        ((1, 4), {"compression": TopK(ratio=0.5)}, "ring"),
    ],
    ids=str,
)
def test_the_algorithm_of_a_compressor(topology, options, wanted):
    assert choice_of(LARGE, node_of(*topology), **options) == wanted


def test_vectors_gain_nothing_from_a_low_rank():
    vectors = bucket_of((100_000,), (3,))
    assert choice_of(vectors, node_of(1, 4), compression=PowerSGD()) == "ring"


def test_a_compressor_that_tells_no_bytes_is_always_used():
    assert choice_of(bucket_of((3,)), node_of(1, 4), compression=Compressor()) == (
        "ring, Compressor"
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(bits: int, value: float):
    code = BlockCode(bits=bits, block=16)
    rows = np.ones([2, 64], "float32")
    rows[1, 20] = value
    words, _ = code.encode(tf.constant(rows))
    found = code.decode(words).numpy()
    assert not np.isfinite(found[1, 16:32]).any()
    np.testing.assert_allclose(found[0], 1, rtol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_the_smallest_numbers_are_decoded(bits: int):
    code = BlockCode(bits=bits, block=16)
    rows = np.zeros([1, 48], "float32")
    rows[0, 16:32], rows[0, 40] = 1e-39, 3e38
    words, _ = code.encode(tf.constant(rows))
    found = code.decode(words).numpy()
    np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-30)


def test_a_sum_that_was_rounded_is_rounded_to_itself():
    code = BlockCode(bits=4, block=16)
    draw = np.random.default_rng(0).normal(size=[1, 160]).astype("float32")
    _, once = code.encode(tf.constant(draw))
    _, twice = code.encode(once)
    np.testing.assert_allclose(twice, once, rtol=1e-6)


def test_bytes_of_four_bits_are_at_most_a_seventh():
    bucket = GradientBucket(size=10**6, dtype="float32", num_replicas=4)
    assert BlockQuantized().wire_ratio(bucket) <= 0.27
    assert BlockQuantized(bits=4).wire_ratio(bucket) <= 0.14
