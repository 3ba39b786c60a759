"""Accumulated gradients as tensors of a checkpoint.

That is as one device would have them: summed over all replicas, without the loss
scale, which the next run may have or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp.checkpoint.model_state import ACCUMULATED_PREFIX, COUNTER, replicated
from tfdp.checkpoint.replica_state import local_replicas, zero_local_values
from tfdp.ground import _compat
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
    """State tensors of the accumulated gradients, without the loss scale.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor`, empty where nothing can be accumulated. Where each
        replica has a sum of its own, call `redistribute_accumulated_gradients` before
        they are read.
    """
    count = accumulation_counter(model)
    if count is None:
        return []
    tensors = [replicated(model, f"{ACCUMULATED_PREFIX}/steps", count, COUNTER)]
    if _shards_gradients(model):
        sums, replicas = accumulated_shards(model), 1
    else:
        # Of these sums each replica has an equal fraction.
        sums = [replicated(model, name, total) for name, total in _sums(model)]
        strategy = strategy_of(model)
        replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    return tensors + [
        _scaled(
            renamed(tensor, f"{ACCUMULATED_PREFIX}/{tensor.name}"),
            lambda: replicas / _scale_of(model),
        )
        for tensor in sums
    ]


def num_accumulated(model: keras.Model) -> int:
    """Number of micro-batches accumulated since the last update."""
    count = accumulation_counter(model)
    return 0 if count is None else int(count.numpy())


def redistribute_accumulated_gradients(model: keras.Model) -> None:
    """Give every replica an equal fraction of the sum. All workers call it.

    What all of them have together stays as it is. Gradients are summed one after the
    other, so that it takes the memory of the largest.

    Args:
        model: As for `accumulated_state`.
    """
    strategy = strategy_of(model)
    if strategy is None or _shards_gradients(model) or not num_accumulated(model):
        return
    redistribute_sums(strategy, [total for _, total in _sums(model)])


def accumulated_shards(model: keras.Model) -> list[StateTensor]:
    """State tensors of sums that are accumulated in shards (ZeRO-2), as they are.

    Args:
        model: As for `accumulated_state`.

    Returns:
        List of `StateTensor`, named by the variables, empty where there are none.
    """
    if not _shards_gradients(model):
        return []
    optimizer: Any = model.optimizer
    trained = _compat.trained_by(optimizer)
    tensors = optimizer.shards.accumulated(optimizer.features.accumulation.sums)
    return [
        renamed(tensors[id(variable)], variable_name(index, trained))
        for index, variable in enumerate(trained)
    ]


def per_replica_sums(model: keras.Model) -> list[tuple[str, Any]]:
    """Accumulators in which each replica has a sum of its own.

    Args:
        model: As for `accumulated_state`.

    Returns:
        List of pairs: the name of the trained variable, and the Keras variable that
        holds another value on each replica. It is empty where there are none.
    """
    is_empty = accumulation_counter(model) is None or _shards_gradients(model)
    return [] if is_empty else list(_sums(model))


def clear_accumulated(model: keras.Model) -> None:
    """Clear accumulated gradients, in which each replica may have a sum of its own."""
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
    """True if the sum over replicas is accumulated in shards (ZeRO-2)."""
    return getattr(model.optimizer, "accumulates_sums", False)


def accumulation_counter(model: keras.Model) -> Any:
    """Counter of accumulated micro-batches, like a variable; `None` without any."""
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "as_keras"):
        accumulation = optimizer.features.accumulation
        return None if accumulation is None else accumulation.count
    groups = _accumulating_groups(optimizer)
    if not groups:
        return None
    counters = [_compat.own_variables(group)[0] for group in groups]
    if is_multi(_inner(optimizer)):
        counters.append(_compat.own_variables(_inner(optimizer))[0])
    steps = groups[0].gradient_accumulation_steps

    def write(value: Any) -> None:
        for counter in counters:
            updates = int(counter.numpy()) // steps
            counter.assign(updates * steps + int(np.asarray(value)))

    return VariableView(
        "", (), lambda: np.asarray(int(counters[0].numpy()) % steps), write
    )


def _sums(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """Name and accumulator of each trained variable, of tfdp or of Keras."""
    optimizer: Any = model.optimizer
    trained = _compat.trained_by(_inner(optimizer))
    if hasattr(optimizer, "as_keras"):
        for index, total in enumerate(optimizer.features.accumulation.sums):
            yield variable_name(index, trained), total
        return
    places = {id(v): variable_name(index, trained) for index, v in enumerate(trained)}
    for group in _accumulating_groups(optimizer):
        pairs = zip(_compat.trained_by(group), _compat.accumulators(group), strict=True)
        for variable, total in pairs:
            if total is not None:
                yield places[id(variable)], total


def _inner(optimizer: Any) -> Any:
    """The optimizer without a `LossScaleOptimizer` around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _accumulating_groups(optimizer: Any) -> list[Any]:
    inner = _inner(optimizer)
    groups = [] if inner is None else innermost(inner)
    return [group for group in groups if _compat.has_accumulators(group)]


def _scale_of(model: keras.Model) -> float:
    """Loss scale to divide accumulated gradients by; it is restored before them."""
    optimizer: Any = model.optimizer
    return (hasattr(optimizer, "as_keras") and optimizer.loss_scale) or 1.0


def _scaled(tensor: StateTensor, factor: Callable[[], float]) -> StateTensor:
    """State tensor that a checkpoint holds multiplied by a factor."""

    def scale(given: LocalShard) -> LocalShard:
        def read() -> np.ndarray:
            values = given.read()
            values = values * np.asarray(factor(), values.dtype)  # a copy
            # An overflow would be skipped; whoever reads this may not look for one.
            values[~np.isfinite(values)] = 0
            return values

        def write(values: Any) -> None:
            values /= np.asarray(factor(), values.dtype)  # no copy of a large one
            given.write(values)

        return LocalShard(given.start, given.stop, read, write)

    return dataclasses.replace(
        tensor,
        owned_shards=tuple(map(scale, tensor.owned_shards)),
        local_shards=tuple(map(scale, tensor.local_shards)),
    )
