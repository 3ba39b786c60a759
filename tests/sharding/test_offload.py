"""Sharded state in host memory, and reports of what state takes."""

from __future__ import annotations

import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.ground.plans.buckets import Entry
from tfdp.ground.plans.memory import replica_memory
from tfdp.ground.plans.sharding import SHARDINGS, ShardingOptions
from tfdp.ground.plans.shards import plan_element_shards, plan_variable_shards

CASE_MODULES = ("sharding.cases_offload",)
ENTRIES = [
    Entry("wide", (64, 32), "float32", 4),
    Entry("half", (512,), "float16", 2),
    Entry("deep", (100, 10), "float32", 4),
]
SLOTS = [2 * entry.num_bytes for entry in ENTRIES]


def test_offload(clusters: ClusterPool, case: Case, setup_name: str):
    clusters.check(case, setup_name)


def test_slices_take_an_nth_of_every_slot():
    plan = plan_element_shards(ENTRIES, 4, bucket_bytes=2**20, first_bucket_bytes=2**20)
    sharding = ShardingOptions("gradients")
    found = replica_memory(ENTRIES, SLOTS, plan, accumulates=True, sharding=sharding)
    whole = replica_memory(ENTRIES, SLOTS, accumulates=True)
    assert found.slots == whole.slots / 4
    assert found.gradients == whole.gradients / 4
    # Halves are added up in float32.
    assert whole.accumulators == 4 * (64 * 32 + 512 + 1000)
    assert found.accumulators == whole.accumulators / 4
    assert found.parameters == whole.parameters


def test_whole_variables_take_as_much_as_the_largest_owner_has():
    plan = plan_variable_shards(ENTRIES, 2, bucket_bytes=2**20)
    found = replica_memory(ENTRIES, SLOTS, plan, accumulates=True)
    assert found.slots == SLOTS[0] + SLOTS[1]
    assert found.accumulators == 4 * (64 * 32 + 512 + 1000)


def test_offload_needs_sharding_and_knows_the_cpu_only():
    import keras

    with pytest.raises(ValueError, match=r"needs sharded state\. Set `sharding`"):
        tfdp.DistributedOptimizer(keras.optimizers.Adam(), offload="cpu")
    with pytest.raises(ValueError, match="Received: offload='disk'"):
        tfdp.callbacks.ShardedOptimizer(offload="disk")


def test_memory_of_the_stages_is_as_published():
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 replicas, weights
    # and gradients of two bytes, twelve bytes of Adam's state for each.
    width, replicas = 2944, 64
    shapes = (width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)
    entries = [
        Entry(f"block_{layer}/{number}", shape, "float16", 2)
        for layer in range(72)
        for number, shape in enumerate(shapes)
    ]
    size = sum(entry.num_elements for entry in entries)
    assert abs(size / 7.5e9 - 1) < 0.01
    slots = [12 * entry.num_elements for entry in entries]
    whole = replica_memory(entries, slots, accumulates=False)
    plan = plan_element_shards(
        entries, replicas, bucket_bytes=25 * 2**20, first_bucket_bytes=2**20
    )
    of_stage = {
        stage: replica_memory(
            entries, slots, plan, accumulates=False, sharding=ShardingOptions(sharding)
        )
        for stage, sharding in enumerate(SHARDINGS)
        if stage
    }
    # In the paper's first stage each replica keeps whole gradients.
    first = of_stage[1].total + whole.gradients - of_stage[1].gradients
    found = [whole.total, first, of_stage[2].total, of_stage[3].total]
    for own, published in zip(found, (120, 31.4, 16.6, 1.9), strict=True):
        assert abs(own / (published * 1e9) - 1) <= 0.05, (own, published)
