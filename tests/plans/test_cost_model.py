"""The cost model against sums done by hand; no TensorFlow."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time

import numpy as np
import pytest

from tests.harness.commands import ROOT
from tests.harness.tiers import full
from tfdp.ground.links import DEFAULT_LINKS, Link, Links
from tfdp.ground.plans.cost_model import candidates_for, choose, predict_seconds
from tfdp.ground.plans.prediction import BucketPrediction, StepPrediction
from tfdp.ground.plans.topology import Topology
from tfdp.ground.plans.traffic import Algorithm, transfers_of
from tfdp.training.reduction.cache_file import links_path, load_links, store_links
from tfdp.training.reduction.link_fit import Sample, fit_links

RING, TREE, HALVING = (Algorithm(n) for n in ("ring", "tree", "halving_doubling"))
HIERARCHICAL = Algorithm("hierarchical")
ADASUM = Algorithm("adasum")
EVERY = (
    RING,
    TREE,
    HALVING,
    *(
        Algorithm("hierarchical", inner, outer)
        for inner in ("ring", "tree", "halving_doubling")
        for outer in ("ring", "tree", "halving_doubling")
    ),
)
# Round numbers: a step takes 1 s inside and 10 s across, a byte 2 s and 3 s.
LINKS = Links(inside=Link(1.0, 2.0), across=Link(10.0, 3.0))
SLOW_LINK = Links(inside=Link(1e-4, 1 / 2e9), across=Link(3e-4, 1 / 0.025e9))


def cluster(num_nodes: int, node_size: int) -> Topology:
    ranks = range(0, num_nodes * node_size, node_size)
    return Topology(tuple(tuple(range(r, r + node_size)) for r in ranks))


@pytest.mark.parametrize(
    ("algorithm", "nodes", "seconds"),
    [
        # 2 (N - 1) messages of S / N, and S = 24.
        (RING, (1, 4), 6 * (1 + 6 * 2)),
        (RING, (1, 3), 4 * (1 + 8 * 2)),
        (RING, (4, 1), 6 * (10 + 6 * 3)),
        (RING, (2, 2), 6 * (10 + 6 * 3)),
        # 2 ceil(log2 N) messages of S; two pairs of (2, 4) cross, one at a time
        # is left at the end.
        (TREE, (1, 4), 4 * (1 + 24 * 2)),
        (TREE, (1, 5), 6 * (1 + 24 * 2)),
        (TREE, (2, 2), 2 * (1 + 24 * 2) + 2 * (10 + 24 * 3)),
        # S / 2 and S / 4, there and back; then across with two streams.
        (HALVING, (1, 4), 2 * (1 + 12 * 2) + 2 * (1 + 6 * 2)),
        (HALVING, (2, 2), 2 * (1 + 12 * 2) + 2 * (10 + 6 * 2 * 3)),
        # One of three is folded in by S before and after.
        (HALVING, (1, 3), 2 * (1 + 24 * 2) + 2 * (1 + 12 * 2)),
        # Scatter and gather of S / 2; two rings of S / 2 share the link.
        (HIERARCHICAL, (2, 2), 2 * (1 + 12 * 2) + 2 * (10 + 6 * 2 * 3)),
        # To one leader and back; one ring of S.
        (
            Algorithm("hierarchical", "tree", "ring"),
            (3, 4),
            4 * (1 + 24 * 2) + 4 * (10 + 8 * 3),
        ),
        # Three of a node fold into two: two streams of S / 2, each a tree.
        (
            Algorithm("hierarchical", "halving_doubling", "tree"),
            (4, 3),
            2 * (1 + 24 * 2) + 2 * (1 + 12 * 2) + 4 * (10 + 12 * 2 * 3),
        ),
        # As halving, and a ring of a few numbers among 2, then 4, of no bytes.
        (ADASUM, (1, 4), 2 * (1 + 12 * 2) + 2 * (1 + 6 * 2) + 2 * 1 + 6 * 1),
        (ADASUM, (1, 3), 2 * (1 + 24 * 2) + 2 * (1 + 12 * 2) + 2 * 1),
        (ADASUM, (2, 2), 2 * (1 + 12 * 2) + 2 * (10 + 6 * 2 * 3) + 2 * 1 + 6 * 10),
        (
            Algorithm("hierarchical", outer="adasum"),
            (2, 2),
            2 * (1 + 12 * 2) + 2 * (10 + 6 * 2 * 3) + 2 * 10,
        ),
    ],
    ids=str,
)
def test_seconds_are_those_of_a_sum_by_hand(algorithm, nodes, seconds):
    assert predict_seconds(algorithm, 24, cluster(*nodes), LINKS) == seconds


def test_replicas_that_share_cores_wait_for_all_messages_in_their_node():
    shared = dataclasses.replace(LINKS, is_inside_shared=True)
    node = cluster(1, 4)
    # All three move 2 (N - 1) S in total, in so many messages.
    assert predict_seconds(RING, 24, node, shared) == 6 * 4 + 2 * 3 * 24 * 2
    assert predict_seconds(TREE, 24, node, shared) == 2 * (2 + 1) + 2 * 3 * 24 * 2
    assert predict_seconds(HALVING, 24, node, shared) == 4 * 4 + 2 * 3 * 24 * 2
    # The same cores send what goes across, before or after.
    two_by_two = 6 * (1 + 6 * 2) + 6 * (10 + 6 * 3)
    assert predict_seconds(RING, 24, cluster(2, 2), shared) == two_by_two
    # The fuller of two nodes bounds; its messages to the other have a link.
    uneven = Topology(((0, 1, 2), (3,)))
    (ring,) = transfers_of(RING, uneven)
    assert (ring.num_inside, ring.num_streams) == (2, 1)


@pytest.mark.parametrize(
    ("algorithm", "nodes", "operations"),
    [
        (RING, (2, 4), 1),
        (TREE, (2, 4), 6),
        (HALVING, (2, 4), 6),
        (HALVING, (1, 6), 6),
        (ADASUM, (1, 4), 6),
        (HIERARCHICAL, (2, 4), 3),
        (HIERARCHICAL, (1, 4), 2),
        (Algorithm("hierarchical", "tree", "halving_doubling"), (2, 4), 6),
    ],
    ids=str,
)
def test_each_operation_of_an_algorithm_is_started_once(algorithm, nodes, operations):
    free = Link(0.0, 0.0)
    links = Links(free, free, operation_seconds=1.0)
    assert predict_seconds(algorithm, 24, cluster(*nodes), links) == operations


@pytest.mark.parametrize("algorithm", EVERY, ids=str)
def test_a_single_replica_or_no_bytes_take_no_time(algorithm):
    assert predict_seconds(algorithm, 100, cluster(1, 1), LINKS) == 0
    assert predict_seconds(algorithm, 0, cluster(2, 2), LINKS) == 0


def link_bytes(algorithm, num_bytes, topology) -> float:
    """Bytes of one all-reduce over the busiest node's link, one way."""
    return num_bytes * sum(
        transfer.repeats * transfer.fraction * transfer.num_streams
        for transfer in transfers_of(algorithm, topology)
    )


@pytest.mark.parametrize(
    ("nodes", "ring", "hierarchical"),
    [((2, 2), 1.5, 1.0), ((2, 4), 1.75, 1.0), ((64, 8), 1022 / 512, 126 / 64)],
)
def test_a_node_sends_what_the_bounds_say(nodes, ring, hierarchical):
    topology = cluster(*nodes)
    assert link_bytes(RING, 1000, topology) == pytest.approx(1000 * ring)
    least = pytest.approx(1000 * hierarchical)
    assert link_bytes(HIERARCHICAL, 1000, topology) == least
    # Neighbours first: halving by pairs is then as good, for powers of two.
    assert link_bytes(HALVING, 1000, topology) == least


@pytest.mark.parametrize(
    ("nodes", "crossings"),
    [
        (((0,),), 0),
        (((0, 1, 2, 3),), 0),
        (((0,), (1,)), 1),
        (((0, 1), (2, 3)), 1),
        (((0, 1), (2, 3), (4, 5)), 1),
        (((0, 2), (1, 3)), 2),
        (((0, 2, 3), (1,)), 1),
        (((0, 2, 4), (1, 3), (5,)), 3),
    ],
)
def test_crossings_count_the_edges_of_the_ring_that_leave_one_node(nodes, crossings):
    streams = [exchange.num_streams for exchange in transfers_of(RING, Topology(nodes))]
    assert streams == [crossings] * bool(len(nodes[0]) > 1 or len(nodes) > 1)


def test_ranks_dealt_out_in_turn_cost_the_ring_a_crossing_at_every_edge():
    dealt = Topology(((0, 2, 4, 6), (1, 3, 5, 7)))
    (ring,) = transfers_of(RING, dealt)
    assert (ring.num_streams, ring.num_inside) == (4, 0)
    packed = predict_seconds(RING, 10**6, cluster(2, 4), SLOW_LINK)
    assert predict_seconds(RING, 10**6, dealt, SLOW_LINK) > 2 * packed


@pytest.mark.parametrize("size", [8, 16, 64])
def test_few_steps_win_where_latency_counts_and_the_ring_where_bytes_do(size):
    node = cluster(1, size)
    assert choose(1_000, node, DEFAULT_LINKS["ring"])[0] == TREE
    assert choose(1_000, cluster(size, 1), DEFAULT_LINKS["nccl"])[0] == TREE
    for links in DEFAULT_LINKS.values():
        assert choose(2 * 10**9, node, links)[0] == RING
    ring = predict_seconds(RING, 1_000, node, DEFAULT_LINKS["ring"])
    for few in (TREE, HALVING):
        assert predict_seconds(few, 1_000, node, DEFAULT_LINKS["ring"]) < 0.6 * ring


def test_across_a_slow_link_large_tensors_go_hierarchically():
    for nodes in ((2, 2), (2, 4)):
        algorithm, seconds = choose(2**26, cluster(*nodes), SLOW_LINK)
        assert algorithm.name == "hierarchical"
        ratio = predict_seconds(RING, 2**26, cluster(*nodes), SLOW_LINK) / seconds
        assert ratio > {2: 1.35, 4: 1.55}[nodes[1]]


def test_ties_go_to_the_ring_and_then_to_whoever_is_first():
    assert choose(1000, cluster(1, 2), LINKS)[0] == RING
    assert choose(1000, cluster(2, 1), LINKS)[0] == RING
    nothing = Links(Link(0.0, 0.0), Link(0.0, 0.0))
    assert choose(1000, cluster(4, 4), nothing) == (RING, 0.0)
    assert choose(1000, cluster(1, 2), LINKS, [HALVING, RING])[0] == HALVING


def test_what_is_chosen_is_within_five_percent_of_the_best():
    for nodes in ((1, 4), (1, 6), (2, 4), (3, 2), (64, 8)):
        topology = cluster(*nodes)
        for num_bytes in (1, 10**3, 10**5, 10**6, 10**7, 10**9):
            for links in (*DEFAULT_LINKS.values(), SLOW_LINK):
                _, seconds = choose(num_bytes, topology, links)
                best = min(
                    predict_seconds(a, num_bytes, topology, links)
                    for a in candidates_for(topology)
                )
                assert best <= seconds <= best / 0.95


def test_the_table_in_the_docs_is_what_auto_takes():
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) nodes? of (\d+) \| (.*) \|$", page, re.M)
    assert len(rows) == 5
    for num_nodes, node_size, cells in rows:
        topology = cluster(int(num_nodes), int(node_size))
        sizes = (4096, 2**20, 25 * 2**20, 2**30)
        for cell, num_bytes in zip(cells.split(" | "), sizes, strict=True):
            best, seconds = choose(num_bytes, topology, DEFAULT_LINKS["nccl"])
            name, _, levels = str(best).partition(" ")
            levels = f" {levels}".replace("halving_doubling", "halving").rstrip()
            assert cell == f"`{name}`{levels}, {1e3 * seconds:.2f} ms"


def test_uneven_nodes_have_no_hierarchical_candidate():
    uneven = Topology(((0, 1), (2,)))
    assert {a.name for a in candidates_for(uneven)} == {a.name for a in EVERY[:3]}
    text = r"same number of replicas .*Received: nodes of \[2, 1\]"
    with pytest.raises(ValueError, match=text):
        predict_seconds(HIERARCHICAL, 100, uneven, LINKS)
    # The flat ones can: three replicas, of which the larger node's link has one.
    assert predict_seconds(RING, 3, uneven, LINKS) == 4 * (10 + 3)


@pytest.mark.parametrize("algorithm", EVERY, ids=str)
@pytest.mark.parametrize("nodes", [(1, 5), (3, 1), (2, 4), (3, 3)])
def test_more_bytes_or_slower_links_never_take_less_time(algorithm, nodes):
    topology = cluster(*nodes)
    sizes = [1, 10, 1000, 10**5, 10**7]
    times = [predict_seconds(algorithm, size, topology, SLOW_LINK) for size in sizes]
    assert times == sorted(times)
    slower = Links(
        Link(2e-4, SLOW_LINK.inside.seconds_per_byte),
        Link(3e-4, 2 * SLOW_LINK.across.seconds_per_byte),
    )
    for size, seconds in zip(sizes, times, strict=True):
        assert predict_seconds(algorithm, size, topology, slower) > seconds


@pytest.mark.parametrize("algorithm", EVERY, ids=str)
def test_half_the_bytes_on_the_wire_is_half_the_tensor(algorithm):
    topology = cluster(2, 4)
    half = predict_seconds(algorithm, 500, topology, LINKS)
    wire_dtypes = {"inner_ratio": 0.5, "outer_ratio": 0.5}
    assert predict_seconds(algorithm, 1000, topology, LINKS, **wire_dtypes) == half


def test_the_outer_wire_alone_matters_to_hierarchical_algorithms_alone():
    topology = cluster(2, 2)
    wire_dtypes = {"outer_ratio": 0.5}
    seconds = predict_seconds(HIERARCHICAL, 24, topology, LINKS, **wire_dtypes)
    assert seconds == 2 * (1 + 12 * 2) + 2 * (10 + 3 * 2 * 3)
    plain = predict_seconds(RING, 24, topology, LINKS)
    assert predict_seconds(RING, 24, topology, LINKS, **wire_dtypes) == plain


def test_thousands_of_replicas_are_predicted_at_once():
    start = time.process_time()
    for nodes in ((512, 8), (4096, 1), (1000, 7)):
        topology = cluster(*nodes)
        for num_bytes in (10**3, 10**6, 10**8):
            choose(num_bytes, topology, DEFAULT_LINKS["nccl"])
    # Milliseconds; with work that grows as the square it would be minutes.
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1.0, 0.0), "Received: alpha_seconds=-1.0"),
        (lambda: Link(0.0, math.nan), "Received: seconds_per_byte=nan"),
        (lambda: Link(0.0, math.inf), "Received: seconds_per_byte=inf"),
        (lambda: Links(Link(0, 0), Link(0, 0), -1), "operation_seconds=-1"),
        (lambda: Algorithm("star"), "Received: name='star'"),
        (lambda: Algorithm("ring", inner="hierarchical"), "Received: inner="),
        (lambda: Sample(RING, 0, cluster(1, 2), 1.0), "Received: num_bytes=0"),
        (lambda: Sample(RING, 1, cluster(1, 2), 0.0), "seconds=0.0"),
        (lambda: predict_seconds(RING, -1, cluster(1, 2), LINKS), "num_bytes=-1"),
        (lambda: choose(1, cluster(1, 2), LINKS, []), r"Received: candidates=\[\]"),
        (lambda: fit_links([]), r"Received: sizes of \[\]"),
        (
            lambda: fit_links([Sample(RING, 5, cluster(1, 2), 1.0)]),
            r"at least two sizes .*Received: sizes of \[5\]",
        ),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Fits.

PLANTED = Links(Link(2.5e-4, 1 / 0.9e9), Link(7e-4, 1 / 0.12e9), 1e-4, True)
SIZES = (2**12, 2**16, 2**20, 2**24)


def samples_of(links, topologies, algorithms, noise=0.0):
    random = np.random.default_rng(0)
    return [
        Sample(
            algorithm,
            size,
            topology,
            predict_seconds(algorithm, size, topology, links)
            * math.exp(noise * random.standard_normal()),
        )
        for topology in topologies
        for algorithm in algorithms
        for size in SIZES
    ]


def constants(links):
    return [
        links.inside.alpha_seconds,
        links.inside.seconds_per_byte,
        links.across.alpha_seconds,
        links.across.seconds_per_byte,
        links.operation_seconds,
    ]


@pytest.mark.parametrize(
    "planted",
    [
        PLANTED,
        DEFAULT_LINKS["nccl"],
        # The links across are the faster ones: only the slower show in a ring.
        Links(PLANTED.across, PLANTED.inside),
        Links(PLANTED.inside, PLANTED.across, 0.0, is_inside_shared=True),
    ],
)
def test_a_fit_finds_the_constants_of_both_levels(planted):
    samples = samples_of(planted, [cluster(2, 4)], [RING, TREE, HALVING, HIERARCHICAL])
    found = fit_links(samples)
    assert constants(found) == pytest.approx(constants(planted), rel=1e-6, abs=1e-14)
    assert found.is_inside_shared == planted.is_inside_shared


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_of_two_by_two_the_link_across_is_taken_to_be_the_slower(noise):
    usual = Links(PLANTED.inside, PLANTED.across)
    for planted in (usual, Links(usual.across, usual.inside)):
        algorithms = [RING, TREE, HALVING, HIERARCHICAL]
        samples = samples_of(planted, [cluster(2, 2)], algorithms, noise)
        found = fit_links(samples)
        assert found.inside.seconds_per_byte < found.across.seconds_per_byte
        across = dataclasses.astuple(found.across)
        wanted = dataclasses.astuple(PLANTED.across)
        assert across == pytest.approx(wanted, rel=2 * noise + 1e-6, abs=0)


def test_a_fit_of_noisy_times_predicts_held_out_ones():
    algorithms = [RING, HALVING, HIERARCHICAL]
    fitted = fit_links(samples_of(PLANTED, [cluster(2, 2)], algorithms, noise=0.1))
    errors = [
        predict_seconds(s.algorithm, s.num_bytes, s.topology, fitted) / s.seconds - 1
        for s in samples_of(PLANTED, [cluster(2, 4), cluster(4, 2)], EVERY)
    ]
    assert np.median(np.abs(errors)) < 0.1


@pytest.mark.parametrize("index", [0, full(4), full(8), 11])
@pytest.mark.parametrize("factor", [0.4, 4.0])
def test_one_time_that_is_far_off_does_not_bend_a_fit(index, factor):
    algorithms = [RING, TREE, HALVING, HIERARCHICAL]
    samples = samples_of(PLANTED, [cluster(2, 4)], algorithms)
    off = samples[index]
    samples[index] = dataclasses.replace(off, seconds=factor * off.seconds)
    found = fit_links(samples)
    errors = [
        predict_seconds(s.algorithm, s.num_bytes, s.topology, found) / s.seconds - 1
        for s in samples_of(PLANTED, [cluster(2, 4), cluster(4, 2)], EVERY)
    ]
    assert np.median(np.abs(errors)) < 0.05


# Milliseconds on two hosts of two workers at 200 Mbit/s (`tools.bench hosts-plan`).
# The link takes 128 KB at once after a pause, so that 256 KB seem to be fast.
TRAINING_MEASURED = {
    RING: (6.74, 17.01, 281.71),
    TREE: (3.39, 14.44, 366.81),
    HALVING: (6.24, 10.91, 199.16),
    HIERARCHICAL: (6.83, 11.55, 190.43),
}
HELD_OUT = {
    RING: {2**14: 5.5, 2**20: 66.3, 2**24: 1074.8, 2**26: 4259.6},
    HALVING: {2**14: 5.7, 2**20: 51.4, 2**24: 884.7, 2**26: 3368.6},
    HIERARCHICAL: {2**14: 5.4, 2**20: 48.6, 2**24: 933.9, 2**26: 3289.6},
}


def test_a_fit_of_measured_times_predicts_sizes_that_were_held_out():
    two_by_two, sizes = cluster(2, 2), (2**12, 2**18, 2**22)
    found = fit_links(
        [
            Sample(algorithm, size, two_by_two, milliseconds / 1e3)
            for algorithm, times in TRAINING_MEASURED.items()
            for size, milliseconds in zip(sizes, times, strict=True)
        ]
    )
    errors = [
        1e3 * predict_seconds(algorithm, size, two_by_two, found) / milliseconds - 1
        for algorithm, times in HELD_OUT.items()
        for size, milliseconds in times.items()
    ]
    assert np.median(np.abs(errors)) < 0.15


def test_a_level_that_no_sample_tells_about_keeps_its_default():
    fitted = fit_links(samples_of(PLANTED, [cluster(1, 4)], [RING]))
    assert fitted.operation_seconds == 0  # in alpha, which 24 messages share
    assert fitted.inside.alpha_seconds == pytest.approx(2.5e-4 + 1e-4 / 24)
    assert fitted.across == DEFAULT_LINKS["ring"].across
    fitted = fit_links(samples_of(PLANTED, [cluster(4, 1)], [RING]))
    assert fitted.across.seconds_per_byte == pytest.approx(1 / 0.12e9)
    assert fitted.inside == DEFAULT_LINKS["ring"].inside


def test_a_fitted_constant_is_never_negative():
    times = [(10**3, 1e-3), (10**6, 1e-3), (2 * 10**6, 9e-4)]
    samples = [Sample(RING, size, cluster(1, 2), seconds) for size, seconds in times]
    inside = fit_links(samples).inside
    assert inside.seconds_per_byte == 0
    # Each of two steps is two messages, of replicas that share their cores.
    assert inside.alpha_seconds == pytest.approx(2.4e-4, rel=0.05)


# The file of measured links.


def test_links_come_back_by_their_key_and_others_stay(tmp_path):
    path = tmp_path / "new" / "links.json"
    assert load_links("a", path) is None
    assert store_links("a", LINKS, path)
    assert store_links("b", PLANTED, path)
    assert (load_links("a", path), load_links("b", path)) == (LINKS, PLANTED)
    assert load_links("b", path).is_inside_shared
    assert load_links("c", path) is None
    assert [p.name for p in path.parent.iterdir()] == ["links.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"a": 1}',
        '{"a": {"inside": {}}}',
        '{"a": {"inside": {"alpha_seconds": -1, "seconds_per_byte": 1}, "across": {}}}',
        '{"a": {"inside": {"alpha_seconds": "1", "seconds_per_byte": 1}}}',
        json.dumps({"a": {**dataclasses.asdict(LINKS), "operation_seconds": None}}),
        json.dumps({"a": {**dataclasses.asdict(LINKS), "other": 1}}),
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_broken_file_is_as_good_as_none_and_is_mended(tmp_path, text):
    path = tmp_path / "links.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load_links("a", path) is None
    assert store_links("a", LINKS, path)
    assert load_links("a", path) == LINKS


def test_a_file_that_cannot_be_written_or_read_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "links.json"  # a file stands where a folder should
    assert not store_links("a", LINKS, path)
    assert load_links("a", path) is None
    folder = tmp_path / "links.json"
    folder.mkdir()
    assert not store_links("a", LINKS, folder)
    assert load_links("a", folder) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "links.json"]


def test_the_file_lies_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert links_path() == tmp_path / ".cache" / "tfdp" / "links.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert links_path() == tmp_path / ".cache" / "tfdp" / "links.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store_links("a", LINKS)
    text = (tmp_path / "xdg" / "tfdp" / "links.json").read_text("utf-8")
    assert list(json.loads(text)) == ["a"]
    assert load_links("a") == LINKS


# A step.


def step_of(seconds, num_bytes, compute_seconds, overlap):
    buckets = tuple(
        BucketPrediction(size, time)
        for size, time in zip(num_bytes, seconds, strict=True)
    )
    return StepPrediction(buckets, compute_seconds, overlap)


@pytest.mark.parametrize(
    ("seconds", "num_bytes", "overlap", "exposed"),
    [
        # 10 s of compute. Ready 2.5 s and 0 s before its end.
        ((1, 1), (10, 10), 0.5, 1),
        # The second waits for the first, of which 1.5 s stick out.
        ((4, 2), (10, 10), 0.5, 3.5),
        # All small: only the last bucket is seen.
        ((0.1,) * 10, (1,) * 10, 1.0, 0.1),
        # Nothing to hide behind.
        ((1, 2, 3), (1, 2, 3), 0.0, 6),
        ((), (), 0.5, 0),
        # Most bytes are ready late, so little of it is hidden.
        ((1, 9), (1, 99), 0.5, 9),
    ],
)
def test_buckets_are_hidden_as_far_as_the_backward_pass_reaches(
    seconds, num_bytes, overlap, exposed
):
    step = step_of(seconds, num_bytes, 10.0, overlap)
    assert step.exposed_seconds == pytest.approx(exposed)
    assert step.communication_seconds == pytest.approx(sum(seconds))
    assert step.step_seconds == pytest.approx(10 + exposed)
    assert step.efficiency == pytest.approx(10 / (10 + exposed))
