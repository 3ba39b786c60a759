"""Which replicas share a node, from hosts, addresses and what a user says."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from tests.harness.timing import within
from tfdp.communication.cluster import nodes, topology_of
from tfdp.ground.plans.topology import Topology


def table(addresses):
    """A resolver that knows a few names, and the list of what it was asked."""
    asked = []

    def resolve(host):
        asked.append(host)
        return addresses.get(host, [])

    return resolve, asked


def nodes_of(hosts, addresses=(), replicas_per_worker=1):
    resolve, _ = table(dict(addresses))
    return topology_of(hosts, replicas_per_worker, resolve=resolve).nodes


def test_ranks_follow_workers_and_nodes_follow_first_appearance():
    assert nodes_of(["b", "a", "b"], replicas_per_worker=2) == ((0, 1, 4, 5), (2, 3))


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        (["a"], ((0,),)),
        (["a", "a"], ((0, 1),)),
        (["a", "A"], ((0, 1),)),
        (["a", "b"], ((0,), (1,))),
        (["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"], ((0, 1, 2, 3),)),
        (["10.0.0.1", "10.0.0.2", "::ffff:10.0.0.1"], ((0, 2), (1,))),
        (["fe80::1", "FE80:0::1", "fe80::2"], ((0, 1), (2,))),
    ],
)
def test_hosts_that_are_written_alike_or_name_one_address_are_one_node(hosts, nodes):
    assert nodes_of(hosts) == nodes


def test_names_that_resolve_to_a_shared_address_are_one_node():
    addresses = {
        "localhost": ["127.0.0.1", "::1"],
        "box": ["127.0.1.1"],
        "two": ["10.0.0.2", "fd00::2"],
        "two.lan": ["fd00::2"],
        "three": ["10.0.0.3"],
    }
    hosts = ["localhost", "two", "127.0.0.1", "box", "three", "TWO.lan", "10.0.0.2"]
    assert nodes_of(hosts, addresses) == ((0, 2, 3), (1, 5, 6), (4,))


def test_a_host_with_two_addresses_joins_what_was_apart_before():
    hosts = ["10.0.0.1", "10.0.0.9", "10.0.1.1", "both"]
    nodes = nodes_of(hosts, {"both": ["10.0.0.1", "10.0.1.1"]})
    assert nodes == ((0, 2, 3), (1,))


def test_the_system_resolves_localhost():
    assert topology_of(["localhost", "127.0.0.1"], 1).num_nodes == 1


def test_each_name_is_resolved_once_and_addresses_never():
    resolve, asked = table({"a": ["10.0.0.1"]})
    topology_of(["a", "A", "b", "a", "10.0.0.1"], 1, resolve=resolve)
    assert sorted(asked) == ["a", "b"]


@pytest.mark.parametrize(
    ("hosts", "overrides"),
    [
        (["a", "a"], {}),
        (["a", "b"], {"node_size": 1}),
        (["a", "b"], {"nodes": ["x", "x"]}),
    ],
)
def test_nothing_is_resolved_where_the_answer_is_known(hosts, overrides):
    resolve, asked = table({})
    topology_of(hosts, 1, resolve=resolve, **overrides)
    assert asked == []


def test_a_name_that_cannot_be_a_host_stands_for_itself():
    assert topology_of(["a..b", "127.0.0.1"], 1).num_nodes == 2


def test_a_resolver_that_hangs_costs_the_limit_once_and_names_stand_for_themselves(
    monkeypatch,
):
    monkeypatch.setattr(nodes, "_RESOLVE_SECONDS", 0.3)
    release = threading.Event()

    def resolve(host):
        if host != "quick":
            release.wait(60)
        return ["10.0.0.1"]

    start = time.monotonic()
    hosts = ["slow", "slower", "quick", "10.0.0.1", "slow"]
    found = topology_of(hosts, 1, resolve=resolve)
    waited_seconds = time.monotonic() - start
    release.set()
    assert found.nodes == ((0, 4), (1,), (2, 3))
    assert waited_seconds < 10


def test_node_size_puts_consecutive_ranks_on_a_node_and_may_split_a_worker():
    assert topology_of(["a", "a"], 2, node_size=2).nodes == ((0, 1), (2, 3))
    assert topology_of(["a", "b"], 2, node_size=4).nodes == ((0, 1, 2, 3),)
    assert topology_of(["a"], 4, node_size=2).nodes == ((0, 1), (2, 3))


def test_names_of_nodes_override_hosts():
    found = topology_of(["h"] * 4, 2, nodes=["a", "a", "b", "b"])
    assert found.nodes == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("size", [3, 8])
def test_a_node_size_that_does_not_divide_the_replicas_is_refused(size):
    with pytest.raises(ValueError, match=f"replicas, 4; .*Received: node_size={size}"):
        topology_of(["a", "b"], 2, node_size=size)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (["x"], "2 workers.*Received: 1 name,"),
        ([], "2 workers.*Received: 0 names"),
        (["x", "y", "y"], "2 workers.*Received: 3 names"),
    ],
)
def test_names_of_nodes_that_do_not_fit_the_workers_are_refused(nodes, words):
    with pytest.raises(ValueError, match=words):
        topology_of(["a", "b"], 1, nodes=nodes)


def test_a_job_without_workers_is_refused():
    with pytest.raises(ValueError, match="topology"):
        topology_of([], 1)


def test_properties_of_even_nodes():
    even = Topology(((0, 1, 4), (2, 3, 5)))
    assert (even.num_replicas, even.num_nodes, even.replicas_per_node) == (6, 2, 3)
    assert even.is_even
    assert even.nodes == ((0, 1, 4), (2, 3, 5))


def test_thousands_of_replicas_are_placed_quickly():
    with within(10):
        found = topology_of(["h"] * 1024, 8, node_size=8)
        assert (found.num_nodes, found.nodes[-1][7]) == (1024, 8191)


@pytest.mark.parametrize(
    "nodes",
    [(), ((),), ((0,), ()), ((1,),), ((0,), (0,)), ((0, 2),), ((0.0,),), ((False, 1),)],
)
def test_ranks_that_are_not_each_there_once_are_refused(nodes):
    with pytest.raises(ValueError, match="every rank from 0 to N - 1 once"):
        Topology(nodes)


def test_a_topology_survives_json_and_is_a_value():
    found = topology_of(["a", "b", "a"], 2, nodes=["a", "b", "a"])
    again = Topology.from_json(found.to_json())
    assert again == found
    assert hash(again) == hash(found)
    assert again.to_json() == found.to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.nodes = ()


@pytest.mark.parametrize("text", ["", "{x", "3", "null", "[]", "[0]", '[["a"]]', "{}"])
def test_json_that_holds_no_topology_is_refused(text):
    with pytest.raises(ValueError, match="A topology in JSON"):
        Topology.from_json(text)
