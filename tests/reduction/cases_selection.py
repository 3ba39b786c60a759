"""Training by every algorithm, and with gradients rounded for the wire."""

from __future__ import annotations

import collections.abc
import contextlib
import json
import typing
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
import tfdp.training.reduction.link_measure as link_measure
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.harness.registry import case, same_as
from tests.reduction.cases_plans import traced_step
from tfdp.ground.plans.topology import Topology
from tfdp.training.reduction.algorithm_selector import AlgorithmSelector
from tfdp.training.reduction.fusion import make_plan
from tfdp.training.reduction.link_measure import (
    LONG_RUN_STEPS,
    load_or_measure_links,
    num_fit_steps,
)
from tfdp.training.strategy.extended import _nodes

# So slow that any byte that is saved is worth it.
SLOW = tfdp.options.Links(tfdp.options.Link(0.0, 1.0), tfdp.options.Link(0.0, 10.0))


def nodes_of(env: Env, node_size: int) -> Topology:
    ranks = list(range(env.num_replicas))
    firsts = range(0, env.num_replicas, node_size)
    return Topology(tuple(tuple(ranks[f : f + node_size]) for f in firsts))


@contextlib.contextmanager
def routed(
    env: Env, **options: typing.Any
) -> collections.abc.Iterator[list[warnings.WarningMessage]]:
    """Trains with other options, under the one strategy of the process.

    Half of the replicas are one node, the other half another.
    """
    if env.is_reference:
        yield []
        return
    extended = env.strategy.extended
    before = extended.algorithm_selector, extended.group.nodes, extended.reducer.options
    node_size = options.pop("node_size", env.num_replicas // 2)
    topology = nodes_of(env, node_size)
    positions = list(range(env.num_replicas))
    chosen = tfdp.CommunicationOptions(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm_selector = AlgorithmSelector(chosen, topology, "ring")
    try:
        extended.algorithm_selector = extended.reducer.algorithm_selector = (
            algorithm_selector
        )
        extended.group.nodes = _nodes(topology, positions)
        extended.reducer.options = chosen
        yield caught
    finally:
        extended.algorithm_selector, extended.group.nodes, extended.reducer.options = (
            before
        )
        extended.reducer.algorithm_selector = before[0]


def train(env: Env, **options: typing.Any) -> dict:
    def build():
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5)
        return common.compiled(common.mlp(units=40), optimizer)

    with routed(env, **options):
        return common.train(env, build, *common.regression_data())


def _train_by(algorithm: typing.Any) -> collections.abc.Callable[[Env], dict]:
    return lambda env: train(env, algorithm=algorithm)


_SAME_AS = {
    "ring": "training_by_hierarchical",
    "tree": "algorithms_add_every_dtype_and_length",
    "halving_doubling": "algorithms_add_every_dtype_and_length",
    "levels": "training_by_hierarchical",
}
for _name, _algorithm in {
    "ring": "ring",
    "tree": "tree",
    "halving_doubling": "halving_doubling",
    "hierarchical": "hierarchical",
    "levels": {"inner": "halving_doubling", "outer": "tree"},
}.items():
    registry.register(
        f"training_by_{_name}",
        _train_by(_algorithm),
        f"training by {_name}",
        quick_setup="two_by_two" if _name == "hierarchical" else "",
        same_as=_SAME_AS.get(_name, ""),
    )


@case("training by what measured links say")
@same_as("training_by_hierarchical")
def training_by_what_links_say(env: Env) -> dict:
    return train(
        env,
        links=tfdp.options.Links(
            tfdp.options.Link(1e-3, 1e-9), tfdp.options.Link(1e-2, 1e-8)
        ),
    )


# Twelve updates with gradients of 8 or 11 bits: close, and not equal.
@case("training in bfloat16 on the wire", tol=0.02)
@same_as("training_by_hierarchical")
def training_with_bfloat16_on_the_wire(env: Env) -> dict:
    return train(env, compression="bf16", links=SLOW)


@case("training in float16 between nodes", tol=0.02)
@same_as("training_by_hierarchical")
def training_with_float16_between_nodes(env: Env) -> dict:
    return train(
        env, algorithm="hierarchical", compression={"outer": "fp16"}, links=SLOW
    )


@case("an overflow of float16 on the wire", compare=False)
def overflow_on_the_wire_is_skipped_like_any_other(env: Env) -> dict:
    x, y = common.regression_data()
    # Gradients of some 1e5 fit float32, and not float16.
    y = y * 1e5
    with routed(env, compression="fp16", links=SLOW):
        with env.scope():
            optimizer = tfdp.DistributedOptimizer(
                keras.optimizers.SGD(1e-9), loss_scale="dynamic"
            )
            model = common.compiled(common.mlp(), optimizer)
        before = model.get_weights()
        common.fit(model, x[: common.BATCH_SIZE], y[: common.BATCH_SIZE])
    assert optimizer.skipped_steps == 1
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    return {}


def _dtypes_sent(model: keras.Model) -> dict[str, int]:
    """Bytes of all collectives in a traced step, by dtype, on all local replicas."""
    step = traced_step(model, common.regression_data())
    found: dict[str, int] = {}
    for launch in launches(step):
        if launch.kind in ("all_reduce", "scatter"):
            found[launch.dtype] = found.get(launch.dtype, 0) + 1
    return found


@case("compression that would not gain", compare=False)
def compression_is_off_where_it_would_not_gain(env: Env) -> dict:
    def build():
        return common.compiled(common.mlp(units=40))

    fast = tfdp.options.Links(tfdp.options.Link(1.0, 0.0), tfdp.options.Link(1.0, 0.0))
    for links, is_compressed in ((fast, False), (SLOW, True)):
        with routed(env, compression="bf16", links=links):
            with env.scope():
                model = build()
            sent = _dtypes_sent(model)
            plan = env.strategy.communication_plan(model)
        assert ("bfloat16" in sent) == is_compressed
        share = 0.5 if is_compressed else 1.0
        ring = 2 * (env.num_replicas - 1) / env.num_replicas
        assert plan.wire_bytes == pytest.approx(share * ring * plan.num_bytes, rel=0.01)
        assert ("bfloat16" in str(plan)) == is_compressed
    return {}


@case(
    "algorithms in the plan",
    setups=(*registry.ALL, "eight_devices"),
    quick_setup="eight_devices",
    compare=False,
)
def plan_shows_algorithm_and_predicted_time(env: Env) -> dict:
    with routed(env, algorithm="hierarchical"):
        with env.scope():
            model = common.compiled(common.mlp())
        plan = env.strategy.communication_plan(model)
    assert {route.algorithm.name for route in plan.routes} == {"hierarchical"}
    assert plan.predicted_seconds > 0
    assert "hierarchical" in str(plan)
    return {}


@case("a hierarchy that is none", setups=("two_by_two",), compare=False)
def hierarchy_without_levels_says_so_once(env: Env) -> dict:
    for node_size, word in ((4, "one node"), (3, "same number of replicas")):
        with routed(env, algorithm="hierarchical", node_size=node_size) as caught:
            routes = {
                str(env.strategy.extended.algorithm_selector.select(size, "float32"))
                for size in (100, 10_000_000)
            }
        assert routes == {"ring"}
        (warning,) = caught
        assert word in str(warning.message)
    with routed(env, compression={"outer": "bf16"}, node_size=4) as caught:
        pass
    assert "no effect" in str(caught[0].message)
    return {}


@case("compression of integers", compare=False)
def compression_of_integers_is_refused(env: Env) -> dict:

    with routed(env, compression="bf16"):
        reducer = env.strategy.extended.reducer
        plan = make_plan([tf.constant([1, 2])], ["counts"], reducer.options)
        with pytest.raises(ValueError, match="Received: 'counts' of int32"):
            reducer.routes_of(plan)
    return {}


@case("the topology of the job", compare=False)
def topology_is_found_from_hosts(env: Env) -> dict:
    if env.is_reference:
        return {}
    topology = env.strategy.extended.algorithm_selector.topology
    assert topology.num_nodes == 1  # every worker of the tests is on this host
    assert topology.num_replicas == env.num_replicas
    assert json.loads(topology.to_json())
    return {}


# One process has one node, and no link to measure.
@case(
    "links that are measured",
    setups=("two_by_two",),
    compare=False,
)
def long_runs_measure_their_links_and_keep_them(env: Env) -> dict:
    # What a byte costs shows between two sizes.
    with mock.patch.object(link_measure, "_SIZES_BYTES", (2**12, 2**22)):
        return _measure_and_keep(env)


@case(
    "links that are measured by tensors of all sizes",
    setups=("two_by_two",),
    compare=False,
)
@same_as("long_runs_measure_their_links_and_keep_them")
def long_runs_measure_their_links_by_all_sizes(env: Env) -> dict:
    return _measure_and_keep(env)


def _measure_and_keep(env: Env) -> dict:
    extended = env.strategy.extended
    worker_group = extended.worker_group

    def learned(num_steps: int | None, name: str) -> tfdp.options.Links | None:
        algorithm_selector = AlgorithmSelector(
            tfdp.CommunicationOptions(), nodes_of(env, 2), "ring"
        )
        load_or_measure_links(
            algorithm_selector, extended.group, worker_group, name, num_steps
        )
        return algorithm_selector.links if algorithm_selector.are_links_known else None

    name = str(env.tmp)  # nothing is kept of it yet
    with routed(env, node_size=2):
        assert learned(LONG_RUN_STEPS - 1, name) is None
        assert learned(None, name) is None
        links = learned(LONG_RUN_STEPS, name)
        assert links is not None
        assert worker_group.all_equal("links", repr(links))
        # Both levels are loopback here; on a busy machine one may show as free.
        assert links.inside.seconds_per_byte + links.across.seconds_per_byte > 0
        # Kept by the first worker, for all of them and for short runs too.
        assert learned(1, name) == links
        assert learned(1, "others") is None
    return {}


@case("times that make no sense", compare=False)
def times_that_fit_nothing_leave_no_worker_waiting(env: Env) -> dict:
    extended = env.strategy.extended
    with (
        routed(env, node_size=2),
        mock.patch.object(link_measure, "fit_links", side_effect=ValueError),
    ):
        algorithm_selector = AlgorithmSelector(
            tfdp.CommunicationOptions(), nodes_of(env, 2), "ring"
        )
        name = str(env.tmp / "none")
        load_or_measure_links(
            algorithm_selector,
            extended.group,
            extended.worker_group,
            name,
            LONG_RUN_STEPS,
        )
    assert not algorithm_selector.are_links_known
    return {}


@case("the number of steps of a fit", compare=False)
def number_of_steps_is_told_from_the_arguments(env: Env) -> dict:
    x = np.zeros((100, 2))
    batches = tf.data.Dataset.from_tensor_slices(x).batch(30)
    found = [
        num_fit_steps({"x": x, "epochs": 3}),
        num_fit_steps({"x": [x, x], "batch_size": 10}),
        num_fit_steps({"x": batches, "epochs": 2}),
        num_fit_steps({"x": batches.repeat(), "epochs": 2}),
        num_fit_steps({"x": batches.repeat(), "steps_per_epoch": 7, "epochs": 2}),
        num_fit_steps({"x": iter([]), "epochs": 2}),
    ]
    assert found == [12, 10, 8, None, 14, None]
    return {}
