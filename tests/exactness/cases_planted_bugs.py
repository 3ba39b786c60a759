"""Faults put into tfdp on purpose, each of which a column of the matrix must catch.

A case here is a cell of `exactness` whose distributed side runs with one fault. On
one device it is the cell itself, so that the comparison must fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tests.exactness import cases_exactness as exactness
from tests.harness import registry
from tests.harness.env import Env

# What the parts of a fault tell each other: each replica is traced in its own thread.
_thread = threading.local()


@contextlib.contextmanager
def loses_the_division_by_n(env: Env, column: Any) -> Iterator[None]:
    """Gradients are summed where their mean is due."""

    def after(reduced: Any, gradients: list) -> Any:
        return reduced.divided_by(tf.constant(1.0 / env.num_replicas))

    with _around_reduction(after=after):
        yield


@contextlib.contextmanager
def clips_before_it_reduces(env: Env, column: Any) -> Iterator[None]:
    """Each replica clips its own gradients, as stock does."""
    from tfdp.training.step.state_layout import StateLayout

    clipping = keras.optimizers.SGD(**column.options)

    def before(gradients: list) -> list:
        return clipping._clip_gradients(gradients)

    with (
        _around_reduction(before=before),
        mock.patch.object(
            StateLayout, "clip", lambda layout, part, sums, _: sums.gradients()
        ),
    ):
        yield


@contextlib.contextmanager
def looks_for_overflow_on_one_replica(env: Env, column: Any) -> Iterator[None]:
    """The first replica's own gradients decide for all, as in stock."""
    from tfdp.training.reduction.fusion import ReducedGradients

    def after(reduced: Any, gradients: list) -> Any:
        values = [getattr(item, "values", item) for item in gradients]
        finite = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
        _thread.is_finite = tf.reduce_all(finite)
        return reduced

    def all_finite(reduced: Any) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        is_first = context.replica_id_in_sync_group == 0
        is_bad = tf.cast(is_first & ~_thread.is_finite, tf.int32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, is_bad) == 0

    with (
        _around_reduction(after=after),
        mock.patch.object(ReducedGradients, "all_finite", all_finite),
    ):
        yield


@contextlib.contextmanager
def updates_one_micro_batch_early(env: Env, column: Any) -> Iterator[None]:
    """The number of micro-batches is off by one."""
    from tfdp.training.step.accumulation import AccumulationState

    def is_complete(state: Any) -> tf.Tensor:
        return state.count + 1 >= state.steps

    with mock.patch.object(AccumulationState, "is_complete", is_complete):
        yield


@contextlib.contextmanager
def decays_what_is_excluded(env: Env, column: Any) -> Iterator[None]:
    """Weight decay takes hold of all variables."""
    with mock.patch.object(
        keras.optimizers.Optimizer, "_use_weight_decay", return_value=True
    ):
        yield


@contextlib.contextmanager
def averages_before_it_updates(env: Env, column: Any) -> Iterator[None]:
    """The moving averages are one update behind."""
    from tfdp.ground._compat import keras_optimizer
    from tfdp.training.step.state_layout import StateLayout

    average, update = keras_optimizer.update_moving_average, StateLayout.update

    def update_after(layout: Any, part: Any, *arguments: Any) -> None:
        average(part.optimizer)
        update(layout, part, *arguments)

    with (
        mock.patch.object(keras_optimizer, "update_moving_average"),
        mock.patch.object(StateLayout, "update", update_after),
    ):
        yield


@contextlib.contextmanager
def weighs_all_replicas_alike(env: Env, column: Any) -> Iterator[None]:
    """A replica with fewer samples counts as much as the others."""
    from tfdp.training.data import batch_weights

    shares_of = batch_weights.weigh_batches

    def alike(*arguments: Any) -> list:
        weight = tf.constant(1.0 / env.num_replicas)
        parts = shares_of(*arguments)
        return [dataclasses.replace(part, weight=weight) for part in parts]

    with mock.patch.object(batch_weights, "weigh_batches", alike):
        yield


@contextlib.contextmanager
def clips_before_it_unscales(env: Env, column: Any) -> Iterator[None]:
    """The limit is held against gradients that are multiplied by the loss scale."""
    from tfdp.training.reduction.fusion import ReducedGradients
    from tfdp.training.step.state_layout import StateLayout

    clip = StateLayout.clip

    def keep(reduced: Any, divisor: tf.Tensor) -> Any:
        _thread.divisor = divisor
        return reduced

    def clip_and_divide(layout: Any, part: Any, sums: Any, findings: Any) -> list:
        clipped = clip(layout, part, sums, findings)
        return [item / tf.cast(_thread.divisor, item.dtype) for item in clipped]

    with (
        mock.patch.object(ReducedGradients, "divided_by", keep),
        mock.patch.object(StateLayout, "clip", clip_and_divide),
    ):
        yield


@contextlib.contextmanager
def updates_with_the_slice_of_another_owner(env: Env, column: Any) -> Iterator[None]:
    """Slices of summed gradients go to the neighbours of their owners."""
    from tfdp.training.parameters.shard_groups import ShardGroups

    scatter = ShardGroups.reduce_scatter

    def scatter_to_neighbours(
        groups: Any, flat: tf.Tensor, *rest: Any, **options: Any
    ) -> tf.Tensor:
        slice_size = flat.shape[0] // groups.num_owners
        return scatter(groups, tf.roll(flat, slice_size, axis=0), *rest, **options)

    with mock.patch.object(ShardGroups, "reduce_scatter", scatter_to_neighbours):
        yield


@contextlib.contextmanager
def takes_norms_of_its_own_slices(env: Env, column: Any) -> Iterator[None]:
    """Each replica clips by the norm of what it owns."""
    from tfdp.training.sharding.shard_collectives import ShardCollectives

    with mock.patch.object(ShardCollectives, "all_reduce", lambda exchange, own: own):
        yield


@contextlib.contextmanager
def does_not_gather_averages(env: Env, column: Any) -> Iterator[None]:
    """Each replica takes the averages that it owns for those of all owners."""
    from tfdp.training.parameters.packing import unpack_rows
    from tfdp.training.sharding.shard_collectives import ShardCollectives
    from tfdp.training.sharding.sharded_layout import ShardedLayout

    gather, overwrite = (
        ShardCollectives.all_gather,
        ShardedLayout.overwrite_with_average,
    )

    def overwrite_with_own(layout: Any, *given: Any) -> None:
        _thread.overwrites = True
        overwrite(layout, *given)
        _thread.overwrites = False

    def gather_updates(exchange: Any, plan: Any, slices: list) -> dict:
        if not getattr(_thread, "overwrites", False):
            return gather(exchange, plan, slices)
        return unpack_rows(plan, [tf.tile(own, [plan.num_owners]) for own in slices])

    with (
        mock.patch.object(ShardedLayout, "overwrite_with_average", overwrite_with_own),
        mock.patch.object(ShardCollectives, "all_gather", gather_updates),
    ):
        yield


@contextlib.contextmanager
def _around_reduction(
    before: Callable[[list], list] = lambda gradients: gradients,
    after: Callable[[Any, list], Any] = lambda reduced, gradients: reduced,
) -> Iterator[None]:
    """Does something to a replica's gradients, or to their sums."""
    from tfdp.training.reduction.gradient_reducer import ReplicaReducer

    reduce = ReplicaReducer.reduce_gradients

    def reduce_gradients(reducer: Any, gradients: list, *rest: Any, **options: Any):
        sums = reduce(reducer, before(gradients), *rest, **options)
        return after(sums, gradients)

    with mock.patch.object(ReplicaReducer, "reduce_gradients", reduce_gradients):
        yield


# By column, the fault that is its own.
BUGS = {
    "no_option": loses_the_division_by_n,
    "accumulation": updates_one_micro_batch_early,
    "global_clipnorm": clips_before_it_reduces,
    "clipnorm": clips_before_it_reduces,
    "clipvalue": clips_before_it_reduces,
    "an_overflow_on_one_replica": looks_for_overflow_on_one_replica,
    "ema": averages_before_it_updates,
    "weight_decay": decays_what_is_excluded,
    "a_partial_batch": weighs_all_replicas_alike,
    "everything": clips_before_it_unscales,
}
# The same for sharded state.
SHARDED_BUGS = {
    "no_option": updates_with_the_slice_of_another_owner,
    "global_clipnorm": takes_norms_of_its_own_slices,
    "ema": does_not_gather_averages,
    "weight_decay": decays_what_is_excluded,
}


def _register(column_name: str, bug: Callable, sharding: str) -> None:
    row, column = exactness.ROWS["sgd_momentum"], exactness.COLUMNS[column_name]

    def function(env: Env) -> dict:
        fault = contextlib.nullcontext() if env.is_reference else bug(env, column)
        with fault:
            return exactness.run_cell(env, row, column, "float32", sharding)

    kind = "an_optimizer" if sharding == "none" else f"a_sharded_{sharding}"
    registry.register(
        f"{column_name}_catches_{kind}_that_{bug.__name__}",
        function,
        f"A fault that the column {column.title!r} must catch",
        setups=("mirrored",),
    )


for _column_name, _bug in BUGS.items():
    _register(_column_name, _bug, "none")
for _column_name, _bug in SHARDED_BUGS.items():
    _register(_column_name, _bug, "optimizer")
