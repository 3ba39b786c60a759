"""What a sharded step communicates, by its graph, and what each replica holds."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.harness.launches import launches
from tests.reduction import cases_plans as plans
from tests.reduction import cases_selection as routes
from tests.sharding import cases_optimizers as own
from tests.sharding.cases_sharded import make
from tfdp.communication.collectives.timing import Recorder

case = registry.case
layers, optimizers = keras.layers, keras.optimizers
# What a reduce-scatter is on CPUs, which have no such collective.
SCATTER, GATHER, REDUCE = "scatter", "all_gather", "all_reduce"
Launches = collections.Counter


@contextlib.contextmanager
def small_buckets(env: Env) -> Iterator[None]:
    """Plans slices, too, in buckets of a kilobyte."""
    extended = env.strategy.extended
    before = extended.options
    with plans.bucket_mb(env, plans.SMALL_MB):
        extended.options = extended.reducer.options
        try:
            yield
        finally:
            extended.options = before


def launches_in(function: Any, group_key: int) -> dict[str, Launches]:
    """How often each kind is launched in a group: always, or in which branch."""
    found = {"always": Launches(), "at_boundary": Launches(), "off": Launches()}
    names = {"then_branch": "at_boundary", "else_branch": "off"}
    for launch in launches(function):
        if launch.group_key == group_key:
            found[names.get(launch.branch, "always")][launch.kind] += 1
    return found


def _step(env: Env, optimizer: Any, build: common.Build = plans.perceptron) -> Any:
    with env.scope():
        model = common.compiled(build(), optimizer())
    return model, plans.traced_step(model, common.regression_data())


def _num_buckets(model: keras.Model) -> int:
    return sum(len(p.plan.buckets) for p in model.optimizer.shards.parts.values())


def _distributed(inner: Any, **options: Any) -> Any:
    options = {"sharding": "optimizer"} | options
    return lambda: tfdp.DistributedOptimizer(inner(), **options)


# For each variant its optimizer, and the number of its sums of a few numbers.
SCALED = {"loss_scale": "dynamic"}
VARIANTS: dict[str, tuple[Any, int]] = {
    "nothing to look at": (_distributed(make(optimizers.Adam)), 0),
    "scaled and clipped": (
        _distributed(make(optimizers.Adam, clipnorm=1.0), **SCALED),
        1,
    ),
}
MORE_VARIANTS: dict[str, tuple[Any, int]] = {
    "clipvalue": (_distributed(make(optimizers.Adam, clipvalue=0.1)), 0),
    "global_clipnorm": (_distributed(make(optimizers.SGD, global_clipnorm=1.0)), 1),
}
if hasattr(optimizers, "MultiOptimizer"):
    MORE_VARIANTS["parts that clip"] = (_distributed(own._multi, **SCALED), 1)


@case(
    "A reduce-scatter and an all-gather for each bucket",
    setups=("mirrored", "two_workers"),
    compare=False,
)
def sharded_step_has_two_collectives_for_each_bucket(env: Env) -> dict:
    return _count_collectives(env, VARIANTS)


@case(
    "A reduce-scatter and an all-gather for each bucket, other ways to clip",
    setups=("mirrored", "two_workers"),
    compare=False,
)
@registry.same_as("sharded_step_has_two_collectives_for_each_bucket")
def sharded_step_that_clips_has_two_collectives_for_each_bucket(env: Env) -> dict:
    return _count_collectives(env, MORE_VARIANTS)


def _count_collectives(env: Env, variants: dict[str, tuple[Any, int]]) -> dict:
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    counts = {}
    for name, (optimizer, num_small) in variants.items():
        with small_buckets(env), Recorder() as recorder:
            model, step = _step(env, optimizer)
        if name == "nothing to look at":
            # As an all-reduce.
            size = _num_bytes(model.trainable_variables)
            expected = 2 * (env.num_replicas - 1) / env.num_replicas * size
            sent = _sent_by_the_first(env, recorder)
            assert abs(sent / expected - 1) <= 0.02, (sent, expected)
        buckets = _num_buckets(model)
        assert buckets >= 2
        found = sum(launches_in(step, key).values(), Launches())
        expected = {SCATTER: buckets, GATHER: buckets, REDUCE: num_small}
        expected = {kind: n * local for kind, n in expected.items() if n}
        assert found == expected, (name, found, expected)
        counts[name] = buckets
    return {
        "buckets": counts,
        "plan": [p.plan.fingerprint for p in model.optimizer.shards.parts.values()],
    }


@case("Micro-batches before the last: stage 1 is silent, stage 2 scatters")
@registry.same_as("micro_batches_before_the_last_launch_no_collective")
def micro_batches_of_sharded_state_communicate_as_little_as_can_be(env: Env) -> dict:
    if env.is_reference:
        return {}
    key, local = env.strategy.extended.group.key, env.setup.devices_per_worker
    for sharding in "optimizer", "gradients":
        optimizer = _distributed(
            make(optimizers.Adam, clipnorm=0.1),
            accumulation_steps=4,
            loss_scale="dynamic",
            sharding=sharding,
        )
        with small_buckets(env):
            model, step = _step(env, optimizer)
        each = _num_buckets(model) * local
        found = launches_in(step, key)
        scattered = {SCATTER: each}
        is_stage_1 = sharding == "optimizer"
        assert found["always"] == ({} if is_stage_1 else scattered), (sharding, found)
        assert found["off"] == {}, (sharding, found)
        expected = {GATHER: each, REDUCE: local} | (scattered if is_stage_1 else {})
        assert found["at_boundary"] == expected, (sharding, found)
    return {}


def _bytes_sent(env: Env, optimizer: Any) -> float:
    """What the first local replica sends in a step, of gradients and weights."""
    with small_buckets(env), Recorder() as recorder:
        _step(env, optimizer)
    return _sent_by_the_first(env, recorder)


def _sent_by_the_first(env: Env, recorder: Recorder) -> float:
    n = env.num_replicas
    factors = dict.fromkeys(("all_to_all", "reduce_scatter"), (n - 1) / n)
    factors["all_reduce"] = 2 * (n - 1) / n
    factors["all_gather"] = n - 1
    traced = [c for c in recorder.collectives if c.replica == 0]
    # Merged logs and counts of samples are a few bytes.
    large = [c for c in traced if c.kind in factors and c.num_bytes >= 64]
    assert large
    return sum(factors[c.kind] * c.num_bytes for c in large)


@case("As many bytes as an all-reduce", compare=False)
@registry.same_as("sharded_step_has_two_collectives_for_each_bucket")
def sharded_step_sends_as_many_bytes_as_an_all_reduce(env: Env) -> dict:
    adam = make(optimizers.Adam)
    plain = _bytes_sent(env, _distributed(adam, sharding="none"))
    sharded = _bytes_sent(env, _distributed(adam))
    assert abs(sharded / plain - 1) <= 0.02, (sharded, plain)
    return {"sharded": sharded, "plain": plain}


@case(
    "Between nodes only slices travel",
    setups=("two_by_two",),
    compare=False,
)
@registry.same_as("uneven_nodes_share_one_state")
def slices_that_nodes_share_travel_in_two_levels(env: Env) -> dict:
    """Inside a node a scatter and a gather; across, the sum of a slice."""
    found = {}
    for scope in "node", "all":
        with routes.routed(env, algorithm="hierarchical"), Recorder() as recorder:
            model, _ = _step(
                env, _distributed(make(optimizers.Adam), shard_scope=scope)
            )
        shards = model.optimizer.shards
        assert shards.groups.num_owners == (2 if scope == "node" else 4)
        (part,) = shards.parts.values()
        (bucket,) = part.plan.buckets
        traced = [c for c in recorder.collectives if c.replica == 0]
        # Where a transport has no reduce-scatter, an all-to-all stands for it.
        scatters = {"reduce_scatter": "scatter", "all_to_all": "scatter"}
        large = [
            (scatters.get(c.kind, c.kind), c.num_bytes)
            for c in traced
            if c.num_bytes >= 64
        ]
        whole, slice_ = 4 * len(bucket.rows) * bucket.slice_size, 4 * bucket.slice_size
        if scope == "node":
            expected = [("scatter", whole), ("all_reduce", slice_)]
            expected += [("all_gather", slice_)]
        else:
            expected = [("scatter", whole), ("scatter", 2 * slice_)]
            expected += [("all_gather", slice_), ("all_gather", 2 * slice_)]
        assert large == expected, (scope, large)
        found[scope] = [num_bytes for _, num_bytes in large]
    return found


# Memory.


def _large() -> keras.Model:
    """Half a million weights, whose number no small number divides."""
    hidden = [layers.Dense(509, activation="tanh") for _ in range(3)]
    return keras.Sequential(
        [keras.Input((common.NUM_FEATURES,)), *hidden, layers.Dense(1)]
    )


def _num_bytes(variables: Any) -> int:
    return sum(int(np.prod(v.shape)) * v.value.dtype.size for v in variables)


def held_by(state: Any) -> int:
    """Bytes of the slots of one replica."""
    slots = [
        slot for found in state.slots.values() for slot in found if slot is not None
    ]
    others = [*getattr(state, "variables", []), *state.singles.values()]
    return _num_bytes({id(v): v for v in [*slots, *others]}.values())


@case(
    "Each replica holds one N-th of the slots",
    setups=(*registry.ALL, "eight_devices"),
    quick_setup="eight_devices",
    compare=False,
)
def each_replica_holds_its_share_of_the_slots(env: Env) -> dict:
    for kind in optimizers.Adam, optimizers.Lamb:
        with env.scope():
            model = _large()
            optimizer = _distributed(make(kind))()
            optimizer.build(model.trainable_variables)
        total = 2 * _num_bytes(model.trainable_variables)
        (part,) = optimizer.shards.parts.values()
        assert len(part.replicas) == env.setup.devices_per_worker
        # Three layers, of which two have nearly all: as even as can be.
        limit = total / (env.num_replicas if kind is optimizers.Adam else 2)
        for state in part.replicas:
            assert held_by(state) <= 1.02 * limit + 2**16, kind
        # And there are no others: a counter and a learning rate.
        assert _num_bytes(optimizer.variables) <= 64
    return {}


@case(
    "Slots that Keras had built are freed",
    compare=False,
    setups=("mirrored", "two_workers"),
)
@registry.same_as("each_replica_holds_its_share_of_the_slots")
def slots_that_keras_had_built_are_freed(env: Env) -> dict:
    data = common.regression_data(16)
    with env.scope():
        model = common.compiled(common.mlp(), make(optimizers.Adam, use_ema=True)())
    common.fit(model, *data)
    own_slots = model.optimizer.variables[2:]
    assert len(own_slots) == 12
    parts = [part for v in own_slots for part in v.value.values]
    references = [weakref.ref(item) for item in (*own_slots, *parts)]
    paths = [v.path for v in own_slots]
    assert len(references) == 12 * (1 + env.setup.devices_per_worker)
    del own_slots, parts
    common.fit(model, *data, callbacks=[tfdp.callbacks.ShardedOptimizer()])
    gc.collect()
    alive = [r().name for r in references if r() is not None]
    assert not alive, (alive, paths)
    # Nothing brings them back.
    common.fit(model, *data)
    model.save_weights(str(env.tmp / "m.weights.h5"))
    gc.collect()
    (part,) = model.optimizer.shards.parts.values()
    total = 3 * _num_bytes(model.trainable_variables)
    for state in part.replicas:
        assert held_by(state) <= total / env.num_replicas + 3 * 4 * env.num_replicas
    return {}
