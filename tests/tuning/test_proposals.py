"""Proposals: which plans are worth a trial, on links that are made up."""

from __future__ import annotations

import pytest

from tfdp.features.tuning.plan_cache import PlanChoice
from tfdp.features.tuning.proposals import MAX_PROPOSALS, Proposal, propose
from tfdp.ground.links import Link, Links
from tfdp.ground.options import CommunicationOptions
from tfdp.ground.plans.buckets import BucketPlan, Entry, plan_buckets
from tfdp.ground.plans.topology import Topology
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector

MB = 2**20
PAIR = Topology(((0,), (1,)))
# Where a message costs nothing to start, and where it costs as much as ten megabytes.
BANDWIDTH = Links(Link(0.0, 1e-9), Link(0.0, 1e-7))
LATENCY = Links(Link(0.0, 1e-9), Link(1.0, 1e-7))


def default_plan(num_entries: int = 64, num_bytes: int = 4 * MB) -> BucketPlan:
    each = num_bytes // num_entries // 4
    entries = [Entry(f"v{i}", (each,), "float32", 4) for i in range(num_entries)]
    return plan_buckets(
        entries,
        range(num_entries),
        bucket_bytes=num_bytes // 4,
        first_bucket_bytes=num_bytes // 4,
    )


def proposed(
    links: Links,
    topology: Topology = PAIR,
    algorithms: tuple[str | None, ...] = (None,),
    plan: BucketPlan | None = None,
    step_seconds: float = 2.0,
) -> list[Proposal]:
    base = CommunicationOptions(bucket_mb="auto", links=links)

    def routes_of(choice: PlanChoice | None, plan: BucketPlan):
        options = base if choice is None else choice.options(base)
        selector = AlgorithmSelector(options, topology, "direct", warn=False)
        return selector.select_for(plan, may_compress=True)

    return propose(plan or default_plan(), step_seconds, algorithms, routes_of)


def test_where_messages_are_free_small_buckets_come_first():
    sizes = [p.choice.bucket_bytes for p in proposed(BANDWIDTH)]
    assert sizes[0] == min(sizes) == 4 * MB // 32


def test_where_messages_are_dear_large_buckets_come_first():
    sizes = [p.choice.bucket_bytes for p in proposed(LATENCY)]
    assert sizes[0] == max(sizes) == 4 * MB


@pytest.mark.parametrize("links", [BANDWIDTH, LATENCY], ids=["bandwidth", "latency"])
def test_proposals_are_few_and_differ_from_the_default_and_each_other(links: Links):
    default = default_plan()
    found = proposed(links, plan=default)
    assert 0 < len(found) <= MAX_PROPOSALS
    plans = [[len(b.entries) for b in p.plan] for p in found]
    assert [len(b.entries) for b in default] not in plans
    assert len({str(plan) for plan in plans}) == len(plans)
    for proposal in found:
        names = [e.name for bucket in proposal.plan for e in bucket.entries]
        assert names == [f"v{i}" for i in range(64)]


def test_on_several_nodes_an_algorithm_is_tried_beside_the_sizes():
    topology = Topology(((0, 1), (2, 3)))
    algorithms = (None, "ring", "tree", "halving_doubling", "hierarchical")
    found = proposed(BANDWIDTH, topology, algorithms)
    sizes = [p.choice.bucket_bytes for p in found]
    assert len(found) == MAX_PROPOSALS
    assert len(set(sizes)) >= MAX_PROPOSALS - 1
    # A link of one node that many streams share: the ring is the slowest.
    assert all(str(route) != "ring" for p in found for route in p.routes)


@pytest.mark.parametrize("num_entries", [1, 2])
def test_of_a_model_of_one_or_two_variables_there_are_hardly_any_plans(
    num_entries: int,
):
    plan = default_plan(num_entries)
    assert len(proposed(BANDWIDTH, plan=plan)) <= num_entries - 1


def test_a_plan_says_what_it_is():
    (first, *_) = proposed(LATENCY)
    assert str(first) == "buckets of 4 MB over ring"


def test_a_chosen_size_is_taken_as_it_is_also_that_of_the_default():
    base = CommunicationOptions(bucket_mb="auto")
    options = PlanChoice(25 * MB, MB).options(base)
    assert options.bucket_bytes == 25 * MB
    assert not options.adapts_buckets
    assert base.adapts_buckets


@pytest.mark.parametrize(
    "entry",
    [
        {"bucket_bytes": 0, "first_bucket_bytes": 1},
        {"bucket_bytes": 1.5, "first_bucket_bytes": 1},
        {"bucket_bytes": True, "first_bucket_bytes": 1},
        {"bucket_bytes": 8, "first_bucket_bytes": -1},
        {"bucket_bytes": 8, "first_bucket_bytes": 8, "algorithm": "star"},
        {"bucket_bytes": 8, "first_bucket_bytes": 8, "algorithm": ["ring"]},
        {"bucket_bytes": 8},
        {"bucket_bytes": 8, "first_bucket_bytes": 8, "more": 1},
    ],
    ids=str,
)
def test_a_choice_that_is_none_is_refused(entry: dict):
    with pytest.raises((ValueError, TypeError)):
        PlanChoice(**entry)
