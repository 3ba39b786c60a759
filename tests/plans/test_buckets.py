"""Bucket plans: pure values, checked without tensors or devices."""

from __future__ import annotations

import random

import pytest

from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import (
    BucketPlan,
    Entry,
    effective_bucket_bytes,
    plan_buckets,
)
from tfdp.training.reduction.fusion import bucket_bytes_of

SIZES = {"float16": 2, "float32": 4, "float64": 8}


def entry(num_elements: int, dtype: str = "float32", name: str = "v") -> Entry:
    return Entry(name, (num_elements,), dtype, SIZES[dtype])


def plan(entries, order=None, bucket=400, first=400) -> BucketPlan:
    return plan_buckets(
        entries,
        range(len(entries)) if order is None else order,
        bucket_bytes=bucket,
        first_bucket_bytes=first,
    )


def indices(made: BucketPlan) -> list[tuple[int, ...]]:
    return [bucket.indices for bucket in made]


def random_entries(seed: int) -> list[Entry]:
    rng = random.Random(seed)
    count = rng.randrange(1, 40)
    return [entry(rng.randrange(1, 200), rng.choice([*SIZES])) for _ in range(count)]


def test_no_entries_make_no_buckets():
    assert len(plan([])) == 0
    assert plan([]).num_bytes == 0


def test_a_bucket_is_filled_to_its_limit_and_not_beyond():
    assert indices(plan([entry(50), entry(50), entry(1)])) == [(0, 1), (2,)]


def test_an_entry_larger_than_a_bucket_travels_alone():
    entries = [entry(10), entry(500), entry(10)]
    assert indices(plan(entries)) == [(1,), (0, 2)]


def test_an_entry_as_large_as_a_bucket_leaves_the_open_one_open():
    entries = [entry(10), entry(100), entry(10), entry(100), entry(10)]
    assert indices(plan(entries)) == [(1,), (3,), (0, 2, 4)]


def test_small_models_get_smaller_buckets_and_large_ones_those_asked_for():
    mb = 2**20
    assert effective_bucket_bytes(1 * mb, 25 * mb) == 1 * mb
    assert effective_bucket_bytes(80 * mb, 25 * mb) == 10 * mb
    assert effective_bucket_bytes(1000 * mb, 25 * mb) == 25 * mb
    assert effective_bucket_bytes(80 * mb, mb // 2) == mb // 2


def test_a_size_that_was_chosen_is_taken_as_it_is():
    entries = [Entry(str(i), (2**20,), "float32", 4) for i in range(20)]
    mb = 2**20
    assert bucket_bytes_of(entries, CommunicationOptions()) == 10 * mb
    assert bucket_bytes_of(entries, CommunicationOptions(bucket_mb=64)) == 64 * mb


def test_first_bucket_closes_at_its_own_limit():
    entries = [entry(10)] * 6
    made = plan(entries, bucket=400, first=80)
    assert indices(made) == [(0, 1), (2, 3, 4, 5)]


def test_entries_follow_the_order_in_which_they_become_ready():
    entries = [entry(60), entry(60), entry(30)]
    assert indices(plan(entries, order=[2, 1, 0])) == [(2, 1), (0,)]


def test_dtypes_never_share_a_bucket_but_interleave_freely():
    entries = [entry(10, "float32"), entry(10, "float16")] * 3
    assert indices(plan(entries)) == [(0, 2, 4), (1, 3, 5)]


def test_buckets_are_launched_when_their_last_entry_is_ready():
    # The float32 bucket stays open until the end, so the others come before it.
    entries = [entry(10), entry(150, "float16"), entry(150, "float16"), entry(10)]
    assert indices(plan(entries)) == [(1,), (2,), (0, 3)]


def test_scalars_and_empty_entries_are_planned_too():
    entries = [Entry("scalar", (), "float32", 4), entry(0), entry(3)]
    made = plan(entries)
    assert indices(made) == [(0, 1, 2)]
    assert made.num_bytes == 16


@pytest.mark.parametrize("seed", range(25))
def test_every_entry_is_in_exactly_one_bucket(seed: int):
    entries = random_entries(seed)
    order = random.Random(seed).sample(range(len(entries)), len(entries))
    made = plan(entries, order)
    assert sorted(i for found in indices(made) for i in found) == sorted(order)
    assert made.num_bytes == sum(e.num_bytes for e in entries)
    for bucket in made:
        assert bucket.entries == tuple(entries[i] for i in bucket.indices)


@pytest.mark.parametrize("seed", range(25))
def test_no_bucket_is_larger_than_allowed_unless_one_entry_is(seed: int):
    entries = random_entries(seed)
    for bucket in plan(entries, bucket=400, first=100):
        assert {e.dtype for e in bucket.entries} == {bucket.dtype}
        assert bucket.num_bytes <= 400 or len(bucket.entries) == 1


@pytest.mark.parametrize("seed", range(25))
def test_order_within_and_between_buckets_is_that_of_readiness(seed: int):
    entries = random_entries(seed)
    order = random.Random(seed).sample(range(len(entries)), len(entries))
    ready = {index: position for position, index in enumerate(order)}
    made = plan(entries, order)
    for bucket in made:
        positions = [ready[i] for i in bucket.indices]
        assert positions == sorted(positions)
    last = [ready[bucket.indices[-1]] for bucket in made]
    assert last == sorted(last)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 2], [1, -1]])
def test_order_that_is_no_permutation_is_refused(order: list[int]):
    with pytest.raises(ValueError, match="each entry from 0 to 1 once") as caught:
        plan([entry(1), entry(1)], order)
    assert str(caught.value).endswith(f"Received: order={order}")


def test_plan_is_the_same_every_time():
    entries = random_entries(7)
    assert plan(entries) == plan(list(entries))
