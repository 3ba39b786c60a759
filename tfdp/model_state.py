"""The training state of a model as tensors with names, however it lies.

Names, shapes and meaning are those of plain Keras: with and without sharding, on any
number of replicas, with tfdp's optimizer or Keras's own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp import _compat
from tfdp.interchange import Entry, accumulator_entry, sums_of
from tfdp.ownership import strategy_of
from tfdp.sharding import place, slot_names
from tfdp.state_tensors import READ_ELEMENTS, Piece, StateTensor
from tfdp.traits import innermost, is_multi
from tfdp.whole_state import WholeState

# What names begin with that a checkpoint may have or not.
LOSS_SCALE, PENDING = "loss_scale", "accumulated"
# What Keras counts in.
_COUNTER = "int64"


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
    sharer = _sharer_of(model)
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    variables = [v for v in model.variables if id(v) not in metrics]
    tensors = [
        sharer.replicated(f"model/{place(i, variables)}", v, str(v.dtype))
        for i, v in enumerate(variables)
    ]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        tensors += _state_of_optimizer(optimizer, sharer)
    return tensors


def pending_state_of(model: keras.Model) -> list[StateTensor]:
    """What has been accumulated for the next update, without the loss scale.

    Args:
        model: As for `state_of`.

    Returns:
        List of `StateTensor`, empty where nothing can be accumulated.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    sharer = _sharer_of(model)
    if not hasattr(optimizer, "as_keras"):
        return list(_pending_of_keras(optimizer, sharer))
    sums = sums_of(optimizer, WholeState())
    if sums is None:
        return []
    tensors = [sharer.replicated(f"{PENDING}/steps", sums.accumulation.count, _COUNTER)]
    trained = _compat.trained_by(optimizer)
    for index in range(len(trained)):
        name = f"{PENDING}/{place(index, trained)}"
        if sums.slices is None:
            dtype = str(sums.accumulation.sums[index].dtype)
            tensors.append(sharer.replicated(name, sums.entry(index), dtype))
        else:
            tensor = sums.slices[index][0]
            tensors.append(_unscaled(name, tensor, lambda: optimizer.loss_scale or 1.0))
    return tensors


class _Sharer:
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


def _sharer_of(model: keras.Model) -> _Sharer:
    strategy = strategy_of(model)
    if strategy is None:
        return _Sharer(0, 1)
    agreement = strategy.extended.agreement
    return _Sharer(agreement.rank, agreement.num_workers)


def _state_of_optimizer(optimizer: Any, sharer: _Sharer) -> Iterator[StateTensor]:
    sharded = getattr(optimizer, "shards", None)
    scale = _scale_of(optimizer)
    if scale is not None:
        yield sharer.replicated(f"{LOSS_SCALE}/value", scale[0], str(scale[0].dtype))
        yield sharer.replicated(f"{LOSS_SCALE}/good_steps", scale[1], _COUNTER)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_multi(inner):
        yield sharer.replicated("optimizer/iterations", _updates(inner), _COUNTER)
    for number, part in enumerate(innermost(inner)):
        if part.built and _compat.trained_by(part):
            slots = None
            if sharded is not None:
                slots = sharded.state(sharded.parts[id(part)])
            yield from _state_of_part(part, number, slots, sharer)


def _state_of_part(
    part: Any, number: int, slots: list[StateTensor] | None, sharer: _Sharer
) -> Iterator[StateTensor]:
    prefix = f"optimizer{number}"
    yield sharer.replicated(f"{prefix}/iterations", _updates(part), _COUNTER)
    if _compat.has_rate_variable(part):
        rate = _compat.rate_variable(part)
        yield sharer.replicated(f"{prefix}/learning_rate", rate, str(rate.dtype))
    for tensor in slots or ():
        yield dataclasses.replace(tensor, name=f"{prefix}/{tensor.name}")
    if slots is not None:
        return
    sums = _compat.accumulators(part) if _compat.has_accumulators(part) else []
    for name, slot in slot_names(part, _compat.trained_by(part)):
        if not any(slot is item for item in sums):
            yield sharer.replicated(f"{prefix}/{name}", slot, str(slot.dtype))


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


def _pending_of_keras(optimizer: Any, sharer: _Sharer) -> Iterator[StateTensor]:
    """What Keras has accumulated itself."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    parts = [] if inner is None else innermost(inner)
    parts = [part for part in parts if _compat.has_accumulators(part)]
    if not parts:
        return
    counters = [_compat.own_variables(part)[0] for part in parts]
    if is_multi(inner):
        counters.append(_compat.own_variables(inner)[0])
    steps = parts[0].gradient_accumulation_steps

    def count(value: Any) -> None:
        for counter in counters:
            updates = int(counter.numpy()) // steps
            counter.assign(updates * steps + int(np.asarray(value)))

    rest = Entry("", (), lambda: np.asarray(int(counters[0].numpy()) % steps), count)
    yield sharer.replicated(f"{PENDING}/steps", rest, _COUNTER)
    trained = _compat.trained_by(inner)
    places = {id(v): place(index, trained) for index, v in enumerate(trained)}
    found = {
        places[id(variable)]: (part, total)
        for part in parts
        for variable, total in zip(
            _compat.trained_by(part), _compat.accumulators(part), strict=True
        )
    }
    for where, (part, total) in found.items():
        entry = accumulator_entry(part, total)
        yield sharer.replicated(f"{PENDING}/{where}", entry, str(total.dtype))


def _unscaled(
    name: str, tensor: StateTensor, scale: Callable[[], float]
) -> StateTensor:
    """A tensor as it would be without the loss scale, which is restored before it."""

    def piece(given: Piece) -> Piece:
        def read() -> np.ndarray:
            values = given.read()
            values = values / np.asarray(scale(), values.dtype)
            # An overflow would be skipped; whoever reads this may not look for one.
            return np.where(np.isfinite(values), values, 0).astype(values.dtype)

        def write(values: Any) -> None:
            scaled = np.asarray(values)
            given.write(scaled * np.asarray(scale(), scaled.dtype))

        return Piece(given.start, given.stop, read, write)

    return dataclasses.replace(
        tensor,
        name=name,
        owned=tuple(map(piece, tensor.owned)),
        held=tuple(map(piece, tensor.held)),
    )
