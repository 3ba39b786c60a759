"""Accumulated gradients as tensors of a checkpoint.

They are stored as one device would hold them: summed over all replicas and divided
by the loss scale, since the next run may use another scale or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp.checkpoint.model_state import ACCUMULATED_PREFIX, COUNTER, replicated
from tfdp.checkpoint.replica_state import local_replicas, zero_local_values
from tfdp.ground._compat import keras_optimizer, optimizer_state
from tfdp.ground.base.context import strategy_of
from tfdp.ground.base.param_groups import innermost, is_multi
from tfdp.training.keras_hooks.file_view import VariableView
from tfdp.training.sharding.full_state import redistribute_sums
from tfdp.training.sharding.state_tensors import (
    LocalShard,
    StateTensor,
    renamed,
    variable_name,
)


def accumulated_state(model: keras.Model) -> list[StateTensor]:
    """Return state tensors of the accumulated gradients, divided by the loss scale.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor`, empty if the optimizer does not accumulate. If each
        replica has its own sum, call `redistribute_accumulated_gradients` before
        reading them.
    """
    count = accumulation_counter(model)
    if count is None:
        return []
    tensors = [replicated(model, f"{ACCUMULATED_PREFIX}/steps", count, COUNTER)]
    if _shards_gradients(model):
        sums, replicas = accumulated_shards(model), 1
    else:
        # `redistribute_accumulated_gradients` leaves each replica the sum over all
        # replicas divided by their number, so saved values are multiplied by that
        # number.
        sums = [
            replicated(model, name, total) for name, total in _named_accumulators(model)
        ]
        strategy = strategy_of(model)
        replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return tensors + [
        _scaled(
            renamed(tensor, f"{ACCUMULATED_PREFIX}/{tensor.name}"),
            lambda: replicas / _current_loss_scale(model),
        )
        for tensor in sums
    ]


def num_accumulated(model: keras.Model) -> int:
    """Return the number of micro-batches accumulated since the last update."""
    count = accumulation_counter(model)
    return 0 if count is None else int(count.numpy())


def redistribute_accumulated_gradients(model: keras.Model) -> None:
    """Give every replica an equal fraction of the gradients accumulated by all.

    All workers call it. The sum over all replicas does not change. Gradients are
    summed one after another, which needs memory for the largest one only.

    Args:
        model: Built Keras model, as for `accumulated_state`.
    """
    strategy = strategy_of(model)
    if strategy is None or _shards_gradients(model) or not num_accumulated(model):
        return
    redistribute_sums(strategy, [total for _, total in _named_accumulators(model)])


def accumulated_shards(model: keras.Model) -> list[StateTensor]:
    """Return state tensors of the accumulated sums that ZeRO-2 shards.

    Their values are those of the sums, which are multiplied by the loss scale.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor`, named after the variables; empty without sharded sums.
    """
    if not _shards_gradients(model):
        return []
    optimizer: Any = model.optimizer
    trained = keras_optimizer.trained_by(optimizer)
    tensors = optimizer.shards.accumulated(optimizer.features.accumulation.sums)
    return [
        renamed(tensors[id(variable)], variable_name(index, trained))
        for index, variable in enumerate(trained)
    ]


def per_replica_sums(model: keras.Model) -> list[tuple[str, Any]]:
    """Return the accumulators that hold a different sum on each replica.

    Args:
        model: Built Keras model, as for `accumulated_state`.

    Returns:
        List of pairs of a name and an accumulator, a Keras variable: each trained
        variable's name and the accumulator of its gradient, unless these are sharded;
        and `"loss"` and the accumulator of the loss, if there is one. Empty if the
        optimizer does not accumulate.
    """
    if accumulation_counter(model) is None:
        return []
    sums = [] if _shards_gradients(model) else list(_named_accumulators(model))
    features = getattr(model.optimizer, "features", None)
    if features is not None and features.loss_sum is not None:
        sums.append(("loss", features.loss_sum))
    return sums


def clear_accumulated(model: keras.Model) -> None:
    """Set accumulated gradients and their counter to zero on all local replicas.

    Replicas of other processes are unchanged.
    """
    count = accumulation_counter(model)
    if count is None:
        return
    count.assign(0)
    for _, total in per_replica_sums(model):
        zero_local_values(total, local_replicas(model))
    for tensor in accumulated_shards(model):
        for local in tensor.local_shards:
            local.write(np.zeros_like(local.read()))


def _shards_gradients(model: keras.Model) -> bool:
    """Return whether a replica accumulates a shard of the gradient sums (ZeRO-2)."""
    return getattr(getattr(model, "optimizer", None), "accumulates_sums", False)


def accumulation_counter(model: keras.Model) -> Any:
    """Return the counter of the micro-batches accumulated since the last update.

    Returns:
        Keras variable, or an object that is read and assigned like one; or `None` if
        the optimizer does not accumulate.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "as_keras"):
        accumulation = optimizer.features.accumulation
        return None if accumulation is None else accumulation.count
    groups = _accumulating_groups(optimizer)
    if not groups:
        return None
    counters = [optimizer_state.own_variables(group)[0] for group in groups]
    unscaled = _without_loss_scaling(optimizer)
    if is_multi(unscaled):
        counters.append(optimizer_state.own_variables(unscaled)[0])
    steps = groups[0].gradient_accumulation_steps

    def write(value: Any) -> None:
        """Set the number of accumulated micro-batches; keep the number of updates.

        Keras counts all micro-batches, also those of past updates, in one variable of
        each optimizer.
        """
        for counter in counters:
            updates = int(counter.numpy()) // steps
            counter.assign(updates * steps + int(np.asarray(value)))

    return VariableView(
        "", (), lambda: np.asarray(int(counters[0].numpy()) % steps), write
    )


def _named_accumulators(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Yield the name of each trained variable, and the accumulator of its gradient.

    Variables without an accumulator are left out.
    """
    optimizer: Any = model.optimizer
    trained = keras_optimizer.trained_by(_without_loss_scaling(optimizer))
    if hasattr(optimizer, "as_keras"):
        for index, total in enumerate(optimizer.features.accumulation.sums):
            yield variable_name(index, trained), total
        return
    names = {id(v): variable_name(index, trained) for index, v in enumerate(trained)}
    for group in _accumulating_groups(optimizer):
        own, sums = (
            keras_optimizer.trained_by(group),
            optimizer_state.accumulators(group),
        )
        for variable, total in zip(own, sums, strict=True):
            if total is not None:
                yield names[id(variable)], total


def _without_loss_scaling(optimizer: Any) -> Any:
    """Return the optimizer inside a `LossScaleOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _accumulating_groups(optimizer: Any) -> list[Any]:
    """Return those Keras optimizers that accumulate gradients.

    They are the inner ones of a multi-optimizer, or the optimizer itself.
    """
    inner = _without_loss_scaling(optimizer)
    groups = [] if inner is None else innermost(inner)
    return [group for group in groups if optimizer_state.has_accumulators(group)]


def _current_loss_scale(model: keras.Model) -> float:
    """Return the loss scale in accumulated gradients; 1.0 without loss scaling."""
    optimizer: Any = model.optimizer
    return (hasattr(optimizer, "as_keras") and optimizer.loss_scale) or 1.0


def _scaled(tensor: StateTensor, factor: Callable[[], float]) -> StateTensor:
    """Return a view of a state tensor whose saved values are multiplied by a factor.

    Restored values are divided by the factor. Products that are not finite are saved
    as zero.

    Args:
        tensor: `StateTensor`.
        factor: Callable that returns the factor; called whenever values are read or
            written.
    """

    def scale(shard: LocalShard) -> LocalShard:
        """Return a view of a shard: reads multiply by `factor()`, writes divide."""

        def read() -> np.ndarray:
            """Return the values multiplied by the factor; overflows become zero."""
            values = shard.read()
            # The product is not computed in place: `values` may share the memory of the
            # accumulator, which a save must not change.
            values = values * np.asarray(factor(), values.dtype)
            # Sums that overflowed are saved as zero. A run with a loss scale skips
            # their update, but a run that restores them without a loss scale would
            # apply them.
            values[~np.isfinite(values)] = 0
            return values

        def write(values: Any) -> None:
            """Write saved values into the shard, divided by the present `factor()`.

            For accumulated gradients, the factor is the number of replicas among which
            the saved sum is divided, over the loss scale.
            """
            values = np.asarray(values)
            shard.write(values / np.asarray(factor(), values.dtype))

        return LocalShard(shard.start, shard.stop, read, write)

    return dataclasses.replace(
        tensor,
        owned_shards=tuple(map(scale, tensor.owned_shards)),
        local_shards=tuple(map(scale, tensor.local_shards)),
    )
