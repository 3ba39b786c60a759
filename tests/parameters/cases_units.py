"""Units of sharded parameters: which, for how long, how far ahead; frozen layers."""

from __future__ import annotations

import warnings

import keras
import pytest

import tfdp
from tests.harness import common, registry
from tests.harness.env import Env
from tests.parameters.cases_parameters import deep
from tests.reduction import cases_selection as routes
from tests.sharding.cases_plans import small_buckets
from tfdp.communication.collectives.timing import GRADIENTS, Collective, Recorder

case = registry.case
layers, optimizers = keras.layers, keras.optimizers


def _adapted() -> keras.Model:
    """A frozen layer, and one of which adapters alone are trained."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(64, activation="relu", trainable=False),
            layers.Dense(64, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.layers[1].enable_lora(2)
    return model


def _train(
    env: Env,
    build: common.Build = deep,
    inner: type[optimizers.Optimizer] = optimizers.SGD,
    **options: object,
) -> keras.Model:
    keras.utils.set_random_seed(3)
    momentum = {"momentum": 0.9} if inner is optimizers.SGD else {}
    optimizer = inner(0.05 if momentum else 0.01, **momentum)
    with env.scope():
        model = build()
        if not env.is_reference:
            optimizer = tfdp.DistributedOptimizer(
                optimizer, sharding="parameters", **options
            )
        model.compile(optimizer, loss="mse")
    common.fit(model, *common.regression_data(), batch_size=8)
    return model


def _recorded(env: Env, **options: object) -> tuple[keras.Model, list[Collective]]:
    """A model, and the gathers and reduce-scatters of a replica's step."""
    if env.is_reference:
        known = ("build", "inner")
        return _train(env, **{n: options[n] for n in known if n in options}), []
    with small_buckets(env), Recorder() as recorder:
        model = _train(env, **options)
    traced = [c for c in recorder.collectives if c.replica == 0 and c.num_bytes >= 64]
    return model, traced


def _gathers(traced: list[Collective]) -> list[Collective]:
    return [c for c in traced if c.label.startswith("unit")]


@case("Frozen layers and LoRA: sharded, never reduced")
def frozen_layers_are_sharded_and_not_reduced(env: Env) -> dict:
    model, traced = _recorded(env, build=_adapted)
    found = {"weights": env.weights(model)}
    if env.is_reference:
        return found
    frozen = model.non_trainable_variables
    assert len(frozen) == 3
    assert all(v.value.has_parts for v in [*frozen, *model.trainable_variables])
    kinds = ("all_to_all", "reduce_scatter")
    reduced = sum(c.num_bytes for c in traced if c.kind in kinds)
    trained = sum(4 * v.value.num_elements for v in model.trainable_variables)
    assert reduced <= 1.1 * trained, (reduced, trained)
    return found


@case("Named layers are units")
@registry.same_as("deferred_parameters_train_like_one_device")
def each_named_layer_is_a_unit(env: Env) -> dict:
    model = _train(env, gather_groups=["second", "third"])
    if not env.is_reference:
        units: dict = {}
        for variable in model.trainable_variables:
            layer = variable.path.split("/")[-2]
            units.setdefault(variable.value.unit.number, set()).add(layer)
        found = [units[number] for number in sorted(units)]
        assert found == [{"first"}, {"second"}, {"third"}, {"fourth", "last"}], found
        with pytest.raises(ValueError, match="has no parameters: 'secnod'"):
            _train(env, gather_groups=["secnod"])
    return {"weights": env.weights(model)}


@case("Kept for the backward pass: 2 S (N - 1) / N")
@registry.same_as("a_step_of_sharded_parameters_sends_three_halves_of_an_all_reduce")
def units_are_kept_where_they_are_not_resharded(env: Env) -> dict:
    model, traced = _recorded(env, reshard_after_forward=False, prefetch=0)
    if not env.is_reference:
        gathered = _gathers(traced)
        units = {v.value.unit.number for v in model.trainable_variables}
        size = sum(4 * v.value.num_elements for v in model.trainable_variables)
        received = sum(c.num_bytes for c in gathered) * env.num_replicas
        assert len(gathered) == len(units) > 3
        assert abs(received / size - 1) <= 0.01, (received, size)
    return {"weights": env.weights(model)}


@case("Gathered again in the node only", setups=("two_by_two",))
@registry.same_as("a_step_of_sharded_parameters_sends_three_halves_of_an_all_reduce")
def units_are_gathered_again_inside_of_nodes(env: Env) -> dict:
    with routes.routed(env, algorithm="ring"):
        model, traced = _recorded(env, reshard_after_forward="node", prefetch=2)
    if not env.is_reference:
        units = {v.value.unit.number for v in model.trainable_variables}
        gathered = _gathers(traced)
        # Across nodes each unit travels once. Inside, all but two travel again: the
        # last of the forward pass is there, and nobody needs the first.
        assert len(gathered) == 3 * len(units) - 2
        size = sum(4 * v.value.num_elements for v in model.trainable_variables)
        ends = sum(
            4 * v.value.num_elements
            for v in model.trainable_variables
            if v.value.unit.number in (min(units), max(units))
        )
        # A quarter across nodes, and a half inside of them, twice.
        expected = size / 4 + size / 2 + (size - ends) / 2
        assert abs(sum(c.num_bytes for c in gathered) / expected - 1) <= 0.01
    return {"weights": env.weights(model)}


@case("Nodes of unequal size", setups=("three_devices",))
@registry.same_as("uneven_nodes_share_one_state")
def uneven_nodes_gather_again_from_all(env: Env) -> dict:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with routes.routed(env, algorithm="ring", node_size=2):
            model = _train(env, common.mlp, reshard_after_forward="node")
    if not env.is_reference:
        texts = {str(w.message) for w in caught if "reshard" in str(w.message)}
        (text,) = texts
        assert text.startswith('`reshard_after_forward="node"` falls back to `True`')
    return {"weights": env.weights(model)}


@case("Parts in the memory of the host")
@registry.same_as("deferred_parameters_train_like_one_device")
def offloaded_parameters_are_gathered_from_the_host(env: Env) -> dict:
    model = _train(env, offload="cpu")
    return {"weights": env.weights(model)}


@case(
    "Lamb: units of which one of four replicas has nearly all",
    setups=("two_by_two",),
)
@registry.same_as("a_step_of_sharded_parameters_sends_three_halves_of_an_all_reduce")
def lopsided_units_are_summed_and_not_padded(env: Env) -> dict:
    model, traced = _recorded(env, inner=optimizers.Lamb)
    if not env.is_reference:
        units = {v.value.unit.number: v.value.unit for v in model.trainable_variables}
        sizes = {
            number: sum(4 * parameter.num_elements for parameter in unit.parameters)
            for number, unit in units.items()
        }
        whole = sum(sizes.values())
        # Neither the first nor the last unit is gathered again.
        again = whole - sizes[min(sizes)] - sizes[max(sizes)]
        gathers = _gathers(traced)
        gradients = [c for c in traced if c.label.startswith(GRADIENTS)]
        # A sum moves each element twice; with padding it would be four times.
        for found, size in (gathers, whole + again), (gradients, whole):
            moved = sum(_bytes_moved(c, env.num_replicas) for c in found)
            assert size < moved <= 2.02 * size, (moved, size)
            assert "all_reduce" in {c.kind for c in found}
    return {"weights": env.weights(model)}


def _bytes_moved(collective: Collective, num_replicas: int) -> int:
    """What passes a replica's link, times N / (N - 1)."""
    factors = {"all_gather": num_replicas, "all_reduce": 2}
    return factors.get(collective.kind, 1) * collective.num_bytes
