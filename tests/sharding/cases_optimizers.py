"""Optimizers of every kind under sharding, and who shares with whom, over what wire."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from tests.harness import common, registry
from tests.harness.env import Env
from tests.keras_hooks import cases_interchange as interchange
from tests.reduction import cases_selection as routes
from tests.sharding.cases_sharded import STAGES, Sharded, make, train
from tests.step.cases_accumulation import MIRRORED, Make

case = registry.case
optimizers = keras.optimizers

if hasattr(optimizers, "MultiOptimizer"):

    def _multi(**options: Any) -> optimizers.Optimizer:
        # One updates slices, the other whole variables.
        clipped = optimizers.Adam(0.01, clipnorm=0.05, use_ema=True, **options)
        default = optimizers.Lamb(0.01, global_clipnorm=0.1, **options)
        chosen = {"dense/.*": clipped}
        return optimizers.MultiOptimizer(optimizers.OptimizerMap(default, chosen))

    @case("MultiOptimizer of slices and whole variables, in stage 2")
    def sharded_multi_optimizer(env: Env) -> dict:
        return _of_parts(env, 3, 2)

    @case("MultiOptimizer of slices and whole variables, in stage 1")
    @registry.same_as("odd_variables_with_lamb_in_stage_2")
    def sharded_multi_optimizer_in_stage_1(env: Env) -> dict:
        return _of_parts(env, 1, 1)

    def _of_parts(env: Env, steps: int, stage: int) -> dict:
        keras.utils.set_random_seed(stage)
        switches = Sharded(steps, stage=stage)
        data = common.regression_data(72)
        results = train(env, switches, _multi, common.mlp, *data)
        # Keras's own counts batches here, and updates everywhere else.
        del results["iterations"]
        return results


@keras.saving.register_keras_serializable(package="cases")
class ListOfSlots(optimizers.Optimizer):
    """A user's momentum of gradients of unit length, in a list."""

    decay = 0.9

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.means = self.add_optimizer_variables(variables, "mean")

    def mean_of(self, variable):
        return self.means[self._get_variable_index(variable)]

    def update_step(self, gradient, variable, learning_rate):
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(gradient))) + 1e-3
        mean = self.mean_of(variable)
        self.assign(mean, self.decay * mean + gradient / norm)
        self.assign_sub(variable, learning_rate * mean)


@keras.saving.register_keras_serializable(package="cases")
class DictOfSlots(ListOfSlots):
    """The same, in a dict, beside a variable that is no slot."""

    def build(self, variables):
        if not self.built:
            optimizers.Optimizer.build(self, variables)
            constant = keras.initializers.Constant(0.9)
            self.decay = self.add_variable((), initializer=constant, name="decay")
            self.by_index = {
                index: self.add_variable_from_reference(v, name="mean")
                for index, v in enumerate(variables)
            }

    def mean_of(self, variable):
        return self.by_index[self._get_variable_index(variable)]


def _own_class(kind: type) -> None:
    def function(env: Env) -> dict:
        results = {}
        for stage in STAGES:
            keras.utils.set_random_seed(stage)
            switches = Sharded(2, stage=stage, by_callback=stage == 1)
            data = common.regression_data(64)
            results[str(stage)] = train(env, switches, make(kind), common.mlp, *data)
        return results

    registry.register(
        f"own_class_with_{kind.__name__}",
        function,
        f"A user's own optimizer class: {kind.__doc__}",
        same_as="own_optimizer_class_sees_whole_tensors",
    )


for _kind in ListOfSlots, DictOfSlots:
    _own_class(_kind)


@case("A user's own class that looks at whole tensors")
@registry.same_as("own_optimizer_class_sees_whole_tensors")
def own_class_without_slots_is_sharded(env: Env) -> dict:
    chosen = make(interchange.NormalizedDescent, 0.05)
    return train(env, Sharded(), chosen, common.mlp, *common.regression_data(64))


@case("Weight decay with exclusions, constraints")
def sharded_state_heeds_exclusions_and_constraints(env: Env) -> dict:
    return _excluding(env, optimizers.AdamW)


@case("Weight decay with exclusions, constraints, other optimizers")
@registry.same_as("sharded_state_heeds_exclusions_and_constraints")
def sharded_state_heeds_exclusions_and_constraints_of_others(env: Env) -> dict:
    return _excluding(env, optimizers.SGD, optimizers.Lamb)


def _excluding(env: Env, *kinds: type) -> dict:
    def build() -> keras.Model:
        return common.mlp(
            units=5, kernel_constraint="max_norm", bias_constraint="non_neg"
        )

    def excluding(kind: type) -> Make:
        def make_it(**options: Any) -> optimizers.Optimizer:
            optimizer = kind(0.05, weight_decay=0.3, **options)
            optimizer.exclude_from_weight_decay(var_names=["bias", "dense_1"])
            return optimizer

        return make_it

    results = {}
    for kind in kinds:
        keras.utils.set_random_seed(2)
        data = common.regression_data(48)
        chosen = excluding(kind)
        results[kind.__name__] = train(env, Sharded(), chosen, build, *data)
    return results


def _averaging(frequency: int | None, kind: type, steps: int) -> Callable:
    def function(env: Env) -> dict:
        chosen = make(
            kind,
            0.05,
            use_ema=True,
            ema_momentum=0.8,
            ema_overwrite_frequency=frequency,
        )
        data = common.regression_data(64)
        switches = Sharded(steps, stage=min(steps, 2))
        return train(env, switches, chosen, common.mlp, *data, epochs=2)

    return function


for _name, _function in {
    "averages_of_slices": _averaging(None, optimizers.SGD, 1),
    "averages_of_slices_overwrite": _averaging(3, optimizers.AdamW, 2),
    "averages_of_whole_variables": _averaging(None, optimizers.Lamb, 1),
    "averages_of_whole_variables_overwrite": _averaging(3, optimizers.Lamb, 2),
}.items():
    registry.register(
        _name,
        _function,
        "EMA of sharded state: " + _name.replace("_", " "),
        same_as="" if _name == "averages_of_slices" else "averages_of_slices",
    )


@case(
    "SwapEMAWeights under sharding",
    setups=MIRRORED,
)
@registry.same_as("ema_overwrite_frequency")
def averages_are_swapped_in_for_validation(env: Env) -> dict:
    x, y = common.regression_data(32)
    chosen = make(optimizers.SGD, 0.05, use_ema=True, ema_momentum=0.7)
    results = {}
    for on_epoch in False, True:
        keras.utils.set_random_seed(2)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        results[str(on_epoch)] = train(
            env,
            Sharded(),
            chosen,
            common.mlp,
            x,
            y,
            validation_data=(x, y),
            callbacks=[swap],
            epochs=2,
        )
    return results


# Who shares with whom, and what travels.


def _wide() -> keras.Model:
    return common.mlp(units=40)


def _routed(
    env: Env, switches: Sharded, kind: type = optimizers.AdamW, **options: Any
) -> dict:
    """Trains where the replicas are nodes of `node_size`."""
    chosen = make(kind, global_clipnorm=0.5)
    with routes.routed(env, **options):
        return train(env, switches, chosen, _wide, *common.regression_data(64))


def _on_nodes(scope: str, stage: int, kind: type) -> None:
    def function(env: Env) -> dict:
        switches = Sharded(1 + stage, scale=16.0, stage=stage, scope=scope)
        return _routed(env, switches, kind, algorithm="hierarchical")

    registry.register(
        f"{kind.__name__.lower()}_in_stage_{stage}_shared_by_{scope}",
        function,
        f'ZeRO-{stage} with `shard_scope="{scope}"` across nodes',
        quick_setup="two_by_two",  # elsewhere a node is one replica
        same_as=""
        if stage == 1 and scope == "node"
        else "adamw_in_stage_1_shared_by_node",
    )


for _scope in "node", "all":
    _on_nodes(_scope, 1, optimizers.AdamW)
    _on_nodes(_scope, 2, optimizers.Lamb)


@case(
    '`shard_scope="node"` on uneven nodes',
    setups=("three_devices",),  # nodes of two are even elsewhere
)
def uneven_nodes_share_one_state(env: Env) -> dict:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = _routed(env, Sharded(scope="node"), node_size=2)
    if not env.is_reference:
        (text,) = {str(w.message) for w in caught if "shard_scope" in str(w.message)}
        assert text.startswith('`shard_scope="node"` falls back to "all"')
    return results


def _compressed(dtype: str, **options: Any) -> None:
    def function(env: Env) -> dict:
        return _routed(env, Sharded(), compression=dtype, links=routes.SLOW, **options)

    registry.register(
        f"sharded_with_{dtype}_on_the_wire",
        function,
        f"Slices that travel in {dtype}: close to those of float32",
        tol=0.02,
        same_as="checkpoint_has_the_residuals_of_int8",
    )


_compressed("bf16")
_compressed("fp16", algorithm="hierarchical")
