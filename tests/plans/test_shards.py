"""Shard plans: pure values, checked without tensors or devices."""

from __future__ import annotations

import collections
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tfdp.ground.plans.buckets import Entry
from tfdp.ground.plans.shards import (
    ShardPlan,
    plan_element_shards,
    plan_variable_shards,
)

SIZES = {"float16": 2, "float32": 4, "float64": 8}
OWNERS = range(1, 10)
SEEDS = range(12)


def entry(num_elements: int, dtype: str = "float32", name: str = "v") -> Entry:
    return Entry(name, (num_elements,), dtype, SIZES[dtype])


def random_entries(seed: int, *, largest: int = 200) -> list[Entry]:
    """Variables of random shapes and dtypes, some scalar, and some empty."""
    rng = random.Random(seed)
    entries = []
    for number in range(rng.randrange(1, 40)):
        shape = tuple(
            rng.randrange(1, int(largest ** (1 / rank)) + 2)
            for rank in [rng.randrange(1, 4)]
            for _ in range(rank)
        )
        shape = rng.choice([shape, shape, shape, (), (0, 3)])
        dtype = rng.choice([*SIZES])
        entries.append(Entry(f"v{number}", shape, dtype, SIZES[dtype]))
    return entries


def slices(entries, owners, bucket=400) -> ShardPlan:
    first = min(bucket, 100)
    return plan_element_shards(
        entries, owners, bucket_bytes=bucket, first_bucket_bytes=first
    )


def whole(entries, owners, bucket=400) -> ShardPlan:
    return plan_variable_shards(entries, owners, bucket_bytes=bucket)


def num_moved(plan: ShardPlan) -> int:
    """Elements that a reduce-scatter of everything moves, with padding."""
    return sum(plan.num_owners * bucket.slice_size for bucket in plan.buckets)


def plans(seed: int) -> Iterable[tuple[list[Entry], ShardPlan]]:
    entries = random_entries(seed)
    for owners in OWNERS:
        yield entries, slices(entries, owners)
        yield entries, whole(entries, owners)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_element_has_one_owner(seed):
    for entries, plan in plans(seed):
        owned: dict[int, list[int]] = collections.defaultdict(list)
        for bucket in plan.buckets:
            assert len(bucket.rows) == plan.num_owners
            for segment in (segment for row in bucket.rows for segment in row):
                owned[segment.index] += range(segment.start, segment.stop)
        for index, item in enumerate(entries):
            assert sorted(owned[index]) == list(range(item.num_elements))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bucket_has_one_dtype_and_no_empty_segment(seed):
    for entries, plan in plans(seed):
        for bucket in plan.buckets:
            assert bucket.indices
            assert {entries[index].dtype for index in bucket.indices} == {bucket.dtype}
            assert all(segment.size for row in bucket.rows for segment in row)


@pytest.mark.parametrize("seed", SEEDS)
def test_padding_makes_all_slices_of_a_bucket_equally_long(seed):
    for _, plan in plans(seed):
        for bucket in plan.buckets:
            for owner, row in enumerate(bucket.rows):
                length = sum(segment.size for segment in row)
                assert length + bucket.padding(owner) == bucket.slice_size
                assert bucket.padding(owner) >= 0
            # No longer than somebody needs.
            assert min(map(bucket.padding, range(plan.num_owners))) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bucket_of_slices_is_padded_by_less_than_one_element_for_each_owner(seed):
    entries = random_entries(seed)
    for owners in OWNERS:
        plan = slices(entries, owners)
        for bucket in plan.buckets:
            paddings = map(bucket.padding, range(owners))
            assert sum(paddings) < owners
        total = sum(item.num_elements for item in entries)
        assert total <= num_moved(plan) < total + owners * max(1, len(plan.buckets))


def test_the_number_of_moved_elements_counts_padding():
    assert num_moved(slices([entry(5)], 2)) == 6
    assert num_moved(slices([entry(5), entry(3, "float64")], 4)) == 8 + 4
    assert num_moved(whole([entry(6), entry(1)], 2)) == 12


def test_more_owners_than_elements_leave_some_with_padding_only():
    plan = slices([entry(2)], 5)
    (bucket,) = plan.buckets
    assert bucket.slice_size == 1
    assert [bucket.padding(owner) for owner in range(5)] == [0, 0, 1, 1, 1]
    plan = whole([entry(3), entry(2)], 4)
    assert plan.owned(0) == (0,)
    assert plan.owned(1) == (1,)
    assert plan.owned(2) == plan.owned(3) == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_buckets_are_as_large_as_asked_for(seed):
    for entries, plan in plans(seed):
        for bucket in plan.buckets:
            size = plan.num_owners * bucket.slice_size * SIZES[bucket.dtype]
            # One variable is not cut into buckets of slices, nor one element.
            largest = max(entries[i].num_bytes for i in bucket.indices)
            slack = plan.num_owners * SIZES[bucket.dtype]
            limit = 400 if plan.shards_variables else max(400, largest)
            assert size < limit + slack


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_variables_come_first(seed):
    entries = [entry(item.num_elements) for item in random_entries(seed)]
    plan = slices(entries, 3)
    laid_out = [s.index for b in plan.buckets for row in b.rows for s in row]
    seen = list(dict.fromkeys(laid_out))
    # A variable that is larger than a bucket travels by itself, and so earlier.
    small = [i for i in seen if entries[i].num_bytes <= 100]
    assert small == sorted(small, reverse=True)


@pytest.mark.parametrize("seed", range(40))
def test_owners_have_about_equally_much_where_variables_are_small_enough(seed):
    entries = random_entries(seed)
    for owners in OWNERS:
        plan = whole(entries, owners)
        for dtype in SIZES:
            sizes = [e.num_bytes if e.dtype == dtype else 0 for e in entries]
            loads = [sum(sizes[i] for i in plan.owned(o)) for o in range(owners)]
            mean = sum(sizes) / owners
            if max(sizes) <= 0.2 * mean:
                assert max(loads) <= 1.2 * mean
            # Graham's bound for the largest first.
            assert max(loads) <= mean + max(sizes)


def test_a_transformer_is_spread_evenly():
    block = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,)]
    block += [(3072, 768), (768,), (768,), (768,)]
    entries = [Entry("v", shape, "float32", 4) for shape in block * 12]
    for owners in range(1, 9):
        plan = whole(entries, owners, bucket=25 * 2**20)
        loads = [
            sum(entries[i].num_bytes for i in plan.owned(o)) for o in range(owners)
        ]
        assert max(loads) <= 1.2 * sum(loads) / owners


@pytest.mark.parametrize("seed", SEEDS)
def test_whole_variables_have_one_owner_in_all_buckets(seed):
    entries = random_entries(seed)
    for owners in OWNERS:
        plan = whole(entries, owners, bucket=64)
        assert plan.shards_variables
        for bucket in plan.buckets:
            for owner, row in enumerate(bucket.rows):
                assert {s.index for s in row} <= set(plan.owned(owner))
        everyone = [i for owner in range(owners) for i in plan.owned(owner)]
        assert sorted(everyone) == list(range(len(entries)))


def test_a_plan_of_slices_has_no_owners_of_whole_variables():
    plan = slices([entry(5)], 2)
    assert not plan.shards_variables
    assert plan.owned(0) == ()


@pytest.mark.parametrize("make", [slices, whole])
def test_the_fingerprint_tells_plans_apart(make):
    entries = [entry(5), entry(3, "float64"), entry(7)]
    plan = make(entries, 3)
    assert plan.fingerprint == make(list(entries), 3).fingerprint
    others = [
        make(entries, 2),
        make(entries[::-1], 3),
        make(entries[:2], 3),
        make([entry(5), entry(3, "float64"), entry(8)], 3),
        make([entry(5), entry(3), entry(7)], 3),
        make(entries, 3, bucket=16),
    ]
    prints = {plan.fingerprint, *(other.fingerprint for other in others)}
    assert len(prints) == 1 + len(others)


def test_every_process_makes_the_same_plan():
    """Hashes of strings differ between processes; owners must not."""
    code = (
        "import test_shards as t; entries = t.random_entries(3); "
        "print(t.slices(entries, 4).fingerprint, t.whole(entries, 4).fingerprint)"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=os.path.dirname(__file__),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    entries = random_entries(3)
    own = f"{slices(entries, 4).fingerprint} {whole(entries, 4).fingerprint}\n"
    assert printed == {own}


@pytest.mark.parametrize("make", [slices, whole])
def test_nothing_to_share_makes_no_buckets(make):
    for entries in [], [Entry("empty", (0, 3), "float32", 4)]:
        plan = make(entries, 3)
        assert plan.buckets == ()
        assert num_moved(plan) == 0


@pytest.mark.parametrize("owners", OWNERS[1:])
def test_what_a_lopsided_bucket_moves_has_no_padding(owners):
    plan = whole([entry(90, name="large"), entry(5, name="small")], owners, 10**6)
    (bucket,) = plan.buckets
    assert bucket.is_lopsided == (owners > 2)
    assert bucket.num_elements == 95
    moved = bucket.moved
    assert len(moved.rows) * moved.slice_size == (95 if owners > 2 else owners * 90)
    found = [bucket.range_in_joined(owner) for owner in range(owners)]
    assert found[0][0] == 0
    assert found[-1][1] == 95
    assert all(b[0] == a[1] for a, b in itertools.pairwise(found))
