"""Sharded state in host memory, and reports of what state takes."""

from __future__ import annotations

import pytest

import tfdp
from tests.harness.pool import ClusterPool
from tests.harness.registry import Case
from tfdp.plans.buckets import Entry
from tfdp.plans.memory import sharded_memory, unsharded_memory
from tfdp.plans.shards import plan_element_shards, plan_variable_shards

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
    found = sharded_memory(
        ENTRIES, SLOTS, plan, accumulates=True, shards_gradients=True
    )
    whole = unsharded_memory(ENTRIES, SLOTS, accumulates=True)
    assert found.slots == whole.slots / 4
    assert found.gradients == whole.gradients / 4
    # Halves are added up in float32.
    assert whole.accumulators == 4 * (64 * 32 + 512 + 1000)
    assert found.accumulators == whole.accumulators / 4
    assert found.parameters == whole.parameters


def test_whole_variables_take_as_much_as_the_largest_owner_has():
    plan = plan_variable_shards(ENTRIES, 2, bucket_bytes=2**20)
    found = sharded_memory(
        ENTRIES, SLOTS, plan, accumulates=True, shards_gradients=False
    )
    assert found.slots == SLOTS[0] + SLOTS[1]
    assert found.accumulators == 4 * (64 * 32 + 512 + 1000)


def test_offload_needs_sharding_and_knows_the_cpu_only():
    import keras

    with pytest.raises(ValueError, match="give `sharding` too"):
        tfdp.DistributedOptimizer(keras.optimizers.Adam(), offload="cpu")
    with pytest.raises(ValueError, match="Received: offload='disk'"):
        tfdp.callbacks.ShardedOptimizer(offload="disk")
