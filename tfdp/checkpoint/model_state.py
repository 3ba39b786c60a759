"""The training state of a model as tensors with names, however it lies.

Names, shapes and meaning are those of plain Keras: with and without sharding, on any
number of replicas, with tfdp's optimizer or Keras's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfdp import _compat
from tfdp.base.ownership import strategy_of
from tfdp.base.param_groups import innermost, is_multi
from tfdp.keras_hooks.file_view import Entry
from tfdp.sharding import place, slot_names
from tfdp.sharding.state_tensors import READ_ELEMENTS, Piece, StateTensor

# What names begin with that a checkpoint may have or not.
LOSS_SCALE, PENDING = "loss_scale", "accumulated"
# What they begin with that only a backup has: the state of a `fit` that is under way.
RUN = "run"
# What Keras counts in.
COUNTER = "int64"


def state_of(model: keras.Model) -> list[StateTensor]:
    """The weights of a model and the state of its optimizer between two updates.

    Args:
        model: Built Keras model, with its optimizer if it is compiled.

    Returns:
        List of `StateTensor` with unique names, in one order.

    Raises:
        ValueError: If the model has no variables yet.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    >>> [tensor.shape for tensor in state_of(model)]
    [(2, 1), (1,)]
    """
    if not model.built:
        raise ValueError(
            "The model has no variables yet. Call `model.build(input_shape)` or train "
            f"it first. Received: {model.name!r}, not built"
        )
    shard_writer = shard_writer_of(model)
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    variables = [v for v in model.variables if id(v) not in metrics]
    tensors = [
        shard_writer.replicated(f"model/{place(i, variables)}", v, str(v.dtype))
        for i, v in enumerate(variables)
    ]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        tensors += _state_of_optimizer(optimizer, shard_writer)
    return tensors


class ShardWriter:
    """Which elements of what all workers hold this one writes."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count

    def replicated(self, name: str, variable: Any, dtype: str) -> StateTensor:
        """A variable of which every worker has the same value."""
        shape = tuple(variable.shape)
        size = int(np.prod(shape, dtype=np.int64))
        start, stop = (size * r // self.count for r in (self.rank, self.rank + 1))

        read = functools.partial(_compat.elements_of, variable)

        def write(values: Any) -> None:
            variable.assign(np.asarray(values).reshape(shape))

        everything = Piece(0, size, lambda: read(0, size), write, read)
        own = dataclasses.replace(
            everything,
            start=start,
            stop=stop,
            read_part=lambda first, last: read(start + first, start + last),
        )
        return StateTensor(
            name, shape, dtype, tuple(own.cut(READ_ELEMENTS)), (everything,)
        )


def shard_writer_of(model: keras.Model) -> ShardWriter:
    """Which elements this worker writes of what all hold of a model."""
    strategy = strategy_of(model)
    if strategy is None:
        return ShardWriter(0, 1)
    worker_group = strategy.extended.worker_group
    return ShardWriter(worker_group.rank, worker_group.num_workers)


def _state_of_optimizer(
    optimizer: Any, shard_writer: ShardWriter
) -> Iterator[StateTensor]:
    sharded = getattr(optimizer, "shards", None)
    scale = _scale_of(optimizer)
    if scale is not None:
        yield shard_writer.replicated(
            f"{LOSS_SCALE}/value", scale[0], str(scale[0].dtype)
        )
        yield shard_writer.replicated(f"{LOSS_SCALE}/good_steps", scale[1], COUNTER)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_multi(inner):
        yield shard_writer.replicated("optimizer/iterations", _updates(inner), COUNTER)
    for number, part in enumerate(innermost(inner)):
        if part.built and _compat.trained_by(part):
            slots = None
            if sharded is not None:
                slots = sharded.state(sharded.parts[id(part)])
            yield from _state_of_part(part, number, slots, shard_writer)


def _state_of_part(
    part: Any, number: int, slots: list[StateTensor] | None, shard_writer: ShardWriter
) -> Iterator[StateTensor]:
    prefix = f"optimizer{number}"
    yield shard_writer.replicated(f"{prefix}/iterations", _updates(part), COUNTER)
    if _compat.has_rate_variable(part):
        rate = _compat.rate_variable(part)
        yield shard_writer.replicated(f"{prefix}/learning_rate", rate, str(rate.dtype))
    for tensor in slots or ():
        yield dataclasses.replace(tensor, name=f"{prefix}/{tensor.name}")
    if slots is not None:
        return
    sums = _compat.accumulators(part) if _compat.has_accumulators(part) else []
    for name, slot in slot_names(part, _compat.trained_by(part)):
        if not any(slot is item for item in sums):
            yield shard_writer.replicated(f"{prefix}/{name}", slot, str(slot.dtype))


def _scale_of(optimizer: Any) -> tuple[Any, Any] | None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.dynamic_scale, optimizer.step_counter
    scale = optimizer.features.scale if hasattr(optimizer, "features") else None
    return None if scale is None else (scale.value, scale.good_steps)


def _updates(part: Any) -> Any:
    """The number of updates: Keras's counter, or micro-batches over their number."""
    counter = _compat.own_variables(part)[0]
    steps = part.gradient_accumulation_steps
    if not steps:
        return counter

    def write(value: Any) -> None:
        rest = int(counter.numpy()) % steps
        counter.assign(int(np.asarray(value)) * steps + rest)

    return Entry(
        counter.path, (), lambda: np.asarray(int(counter.numpy()) // steps), write
    )
