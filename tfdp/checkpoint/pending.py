"""Gradients that wait for the next update, as a checkpoint holds them.

That is as one device would have them: summed over all replicas, without the loss
scale, which the next run may have or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp import _compat
from tfdp.base.ownership import strategy_of
from tfdp.base.param_groups import innermost, is_multi
from tfdp.checkpoint.model_state import COUNTER, PENDING, ShardWriter, shard_writer_of
from tfdp.keras_hooks.file_view import Entry
from tfdp.sharding import place
from tfdp.sharding.full_state import redistribute_sum
from tfdp.sharding.state_tensors import Piece, StateTensor


def pending_state_of(model: keras.Model) -> list[StateTensor]:
    """What has been accumulated for the next update, without the loss scale.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor`, empty where nothing can be accumulated. Where each
        replica has a sum of its own, `redistribute_pending` makes them right to read.
    """
    count = _counter(model)
    if count is None:
        return []
    shard_writer = shard_writer_of(model)
    tensors = [shard_writer.replicated(f"{PENDING}/steps", count, COUNTER)]
    if _holds_slices(model):
        return tensors + list(_of_slices(model))
    return tensors + list(_of_sums(model, shard_writer))


def num_pending(model: keras.Model) -> int:
    """How many micro-batches wait for the next update."""
    count = _counter(model)
    return 0 if count is None else int(count.numpy())


def redistribute_pending(model: keras.Model) -> None:
    """Gives every replica an equal part of what waits. All workers call it.

    What all of them have together stays as it is. Gradients are summed one after the
    other, so that it takes the memory of the largest.

    Args:
        model: As for `pending_state_of`.
    """
    strategy = strategy_of(model)
    if strategy is None or _holds_slices(model) or not num_pending(model):
        return
    extended = strategy.extended
    for _, total in _sums(model):
        parts = [
            _compat.local_value(total, replica)
            for replica in range(len(extended.group.devices))
        ]
        redistribute_sum(parts, extended.host_group, strategy.num_replicas_in_sync)


def counter_of(model: keras.Model) -> Any:
    """The number of micro-batches that wait, like a variable, or `None`."""
    return _counter(model)


def slices_of(model: keras.Model) -> list[StateTensor]:
    """What is accumulated as slices of the sum of all replicas, as it is.

    Args:
        model: As for `pending_state_of`.

    Returns:
        List of `StateTensor`, named by the variables, empty where there are none.
    """
    return list(_named_slices(model)) if _holds_slices(model) else []


def own_sums_of(model: keras.Model) -> list[tuple[str, Any]]:
    """What each replica has accumulated by itself, as it is.

    Args:
        model: As for `pending_state_of`.

    Returns:
        List of pairs: the name of the trained variable, and the Keras variable that
        holds another value on each replica. It is empty where there are none.
    """
    is_empty = _counter(model) is None or _holds_slices(model)
    return [] if is_empty else list(_sums(model))


def _holds_slices(model: keras.Model) -> bool:
    """Whether slices of the sum over replicas are accumulated (ZeRO-2)."""
    return getattr(model.optimizer, "accumulates_sums", False)


def _counter(model: keras.Model) -> Any:
    """The number of micro-batches that wait, or `None` where none can."""
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "as_keras"):
        accumulation = optimizer.features.accumulation
        return None if accumulation is None else accumulation.count
    parts = _accumulating_parts(optimizer)
    if not parts:
        return None
    counters = [_compat.own_variables(part)[0] for part in parts]
    if is_multi(_inner(optimizer)):
        counters.append(_compat.own_variables(_inner(optimizer))[0])
    steps = parts[0].gradient_accumulation_steps

    def write(value: Any) -> None:
        for counter in counters:
            updates = int(counter.numpy()) // steps
            counter.assign(updates * steps + int(np.asarray(value)))

    return Entry("", (), lambda: np.asarray(int(counters[0].numpy()) % steps), write)


def _sums(model: keras.Model) -> Iterator[tuple[str, Any]]:
    """The name and the accumulator of each trained variable, of tfdp or of Keras."""
    optimizer: Any = model.optimizer
    trained = _compat.trained_by(_inner(optimizer))
    if hasattr(optimizer, "as_keras"):
        for index, total in enumerate(optimizer.features.accumulation.sums):
            yield place(index, trained), total
        return
    places = {id(v): place(index, trained) for index, v in enumerate(trained)}
    for part in _accumulating_parts(optimizer):
        pairs = zip(_compat.trained_by(part), _compat.accumulators(part), strict=True)
        for variable, total in pairs:
            if total is not None:
                yield places[id(variable)], total


def _inner(optimizer: Any) -> Any:
    """The optimizer without a `LossScaleOptimizer` around it."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _accumulating_parts(optimizer: Any) -> list[Any]:
    inner = _inner(optimizer)
    parts = [] if inner is None else innermost(inner)
    return [part for part in parts if _compat.has_accumulators(part)]


def _of_sums(model: keras.Model, shard_writer: ShardWriter) -> Iterator[StateTensor]:
    """Each replica has an equal part of the sum, a fraction of what is saved."""
    strategy = strategy_of(model)
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    for where, total in _sums(model):
        tensor = shard_writer.replicated(f"{PENDING}/{where}", total, str(total.dtype))
        yield _times(tensor, lambda: replicas / _scale_of(model))


def _of_slices(model: keras.Model) -> Iterator[StateTensor]:
    for tensor in _named_slices(model):
        named = dataclasses.replace(tensor, name=f"{PENDING}/{tensor.name}")
        yield _times(named, lambda: 1.0 / _scale_of(model))


def _named_slices(model: keras.Model) -> Iterator[StateTensor]:
    optimizer: Any = model.optimizer
    trained = _compat.trained_by(optimizer)
    tensors = optimizer.shards.accumulated(optimizer.features.accumulation.sums)
    for index, variable in enumerate(trained):
        yield dataclasses.replace(tensors[id(variable)], name=place(index, trained))


def _scale_of(model: keras.Model) -> float:
    """By what tfdp's sums are too large, and Keras's are not; it is restored first."""
    optimizer: Any = model.optimizer
    return (hasattr(optimizer, "as_keras") and optimizer.loss_scale) or 1.0


def _times(tensor: StateTensor, factor: Callable[[], float]) -> StateTensor:
    """A tensor of which a checkpoint holds a multiple."""

    def of_piece(given: Piece) -> Piece:
        def read() -> np.ndarray:
            values = given.read()
            values = values * np.asarray(factor(), values.dtype)  # a copy
            # An overflow would be skipped; whoever reads this may not look for one.
            values[~np.isfinite(values)] = 0
            return values

        def write(values: Any) -> None:
            values /= np.asarray(factor(), values.dtype)  # no copy of a large one
            given.write(values)

        return Piece(given.start, given.stop, read, write)

    return dataclasses.replace(
        tensor,
        owned=tuple(map(of_piece, tensor.owned)),
        held=tuple(map(of_piece, tensor.held)),
    )
