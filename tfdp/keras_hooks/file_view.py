"""The user's own optimizer, as a view of the `DistributedOptimizer` around it.

That is what files hold: accumulation as `gradient_accumulation_steps`, loss scaling
as a `LossScaleOptimizer`, sharded state as if it were whole. What is loaded into the
view goes back the same way, and what a built optimizer had is taken over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfdp import _compat
from tfdp.base.ownership import num_replicas_of
from tfdp.base.param_groups import innermost, is_multi
from tfdp.sharding import ShardedState
from tfdp.sharding.full_state import FullState
from tfdp.sharding.state_tensors import StateTensor
from tfdp.step.accumulation import Accumulation
from tfdp.step.loss_scale import LossScale, LossScaling


class Entry:
    """A value of a file: read when it is written, and taken in when it is loaded.

    Args:
        name: String.
        shape: Tuple of ints.
        read: Callable that returns the value as an array.
        write: Callable that takes a loaded array.
    """

    def __init__(
        self, name: str, shape: tuple[int, ...], read: Callable, write: Callable
    ) -> None:
        self.name = self.path = name
        self.shape = shape
        self.numpy = read
        self.assign = write

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.asarray(self.numpy(), dtype)


def plain_view(distributed: Any, whole: FullState) -> Any:
    """An optimizer as a file should hold it, sharing the state of another.

    Args:
        distributed: `DistributedOptimizer`, built or not.
        whole: `FullState`, what is known of sharded state.

    Returns:
        A Keras optimizer of the class of the wrapped one, or a
        `LossScaleOptimizer` around it.
    """
    view, features = distributed.inner_optimizer, distributed.features
    if distributed.is_sharded:
        view = _with_whole_state(view, distributed.shards, whole)
    if features.steps > 1:
        view = _accumulating(view, features.steps, sums_of(distributed, whole))
    scaling, scale = features.scaling, features.scale
    if scaling is None:
        return view
    if scaling.growth_steps is None:
        return _compat.with_fixed_scale(view, scaling.initial_scale)
    return _compat.loss_scale_optimizer(
        view,
        initial_scale=scaling.initial_scale,
        growth_steps=scaling.growth_steps,
        counters=None if scale is None else (scale.good_steps, scale.value),
    )


def sharded_tensors(distributed: Any) -> list[StateTensor]:
    """What the replicas share: slots, and slices that are accumulated.

    Args:
        distributed: `DistributedOptimizer`.

    Returns:
        List of `StateTensor`, empty where every replica has everything.
    """
    shards, accumulation = distributed.shards, distributed.features.accumulation
    if shards is None:
        return []
    tensors = shards.tensors()
    if distributed.accumulates_sums and accumulation is not None:
        tensors += shards.accumulated(accumulation.sums).values()
    return tensors


def _with_whole_state(optimizer: Any, shards: ShardedState, whole: FullState) -> Any:
    """An optimizer whose state is sharded, as if its slots were whole.

    Args:
        optimizer: The user's Keras optimizer.
        shards: `ShardedState`, where its state lies.
        whole: `FullState`, what is known of it.

    Returns:
        A Keras optimizer of the same class.
    """
    views = {}
    for part in innermost(optimizer):
        sharded = shards.parts.get(id(part))
        views[id(part)] = part
        if sharded is not None:
            entries = [_entry(tensor, whole) for tensor in shards.state(sharded)]
            num_averages = len(sharded.variables) if part.use_ema else 0
            views[id(part)] = _compat.with_state(part, entries, num_averages)
    if not is_multi(optimizer):
        return views[id(optimizer)]
    return _compat.multi_with_parts(optimizer, views, None)


def _entry(tensor: StateTensor, whole: FullState) -> Entry:
    def write(value: Any) -> None:
        flat = np.asarray(value).ravel()
        for piece in tensor.held:
            piece.write(flat[piece.start : piece.stop])

    return Entry(tensor.name, tensor.shape, lambda: whole.read(tensor), write)


@dataclasses.dataclass(frozen=True)
class Sums:
    """What has been accumulated, as one device would hold it."""

    accumulation: Accumulation
    scale: LossScale | None
    num_replicas: int
    # Each with what is known of it, where slices are accumulated.
    slices: list[tuple[StateTensor, FullState]] | None = None

    @property
    def steps(self) -> int:
        return int(self.accumulation.steps.numpy())

    def entry(self, index: int) -> Entry:
        """The sum over replicas: while nothing is under way each holds its N-th.

        Keras accumulates unscaled gradients, tfdp scaled ones.
        """
        if self.slices is not None:
            # Slices are those of the sum over replicas, and each has one owner.
            inner, share = _entry(*self.slices[index]), 1
        else:
            inner = self._own_entry(self.accumulation.sums[index])
            share = self.num_replicas

        def factor() -> float:
            return 1.0 if self.scale is None else float(self.scale.value.numpy())

        def read() -> np.ndarray:
            total = inner.numpy()
            total = total / np.asarray(factor(), total.dtype)
            # An overflow would be skipped here; Keras looks at new gradients only.
            return total if np.isfinite(total).all() else np.zeros_like(total)

        def write(value: Any) -> None:
            inner.assign(np.asarray(value) * (factor() / share))

        return Entry(inner.path, inner.shape, read, write)

    def _own_entry(self, variable: Any) -> Entry:
        return Entry(
            variable.path,
            tuple(variable.shape),
            lambda: _compat.sum_of_local_parts(variable, self.num_replicas),
            variable.assign,
        )

    def counter(self, iterations: Any) -> Entry:
        """Keras counts micro-batches where it accumulates; tfdp counts updates."""
        count = self.accumulation.count

        def read() -> np.ndarray:
            updates = int(iterations.numpy())
            return np.asarray(updates * self.steps + int(count.numpy()))

        def write(value: Any) -> None:
            updates, rest = divmod(int(np.asarray(value)), self.steps)
            iterations.assign(updates)
            count.assign(rest)

        return Entry(iterations.path, (), read, write)


def sums_of(distributed: Any, whole: FullState) -> Sums | None:
    """What a `DistributedOptimizer` has accumulated, or `None` without variables."""
    features, shards = distributed.features, distributed.shards
    accumulation, slices = features.accumulation, None
    if accumulation is None:
        return None
    if distributed.accumulates_sums:
        tensors = shards.accumulated(accumulation.sums)
        trained = _compat.trained_by(distributed)
        slices = [(tensors[id(variable)], whole) for variable in trained]
    replicas = num_replicas_of(distributed)
    return Sums(accumulation, features.scale, replicas, slices)


def _accumulating(optimizer: Any, steps: int, sums: Sums | None) -> Any:
    parts = innermost(optimizer)
    views = {id(p): _part_view(optimizer, p, steps, sums) for p in parts}
    if not is_multi(optimizer):
        return views[id(optimizer)]
    counter = sums and sums.counter(_compat.own_variables(optimizer)[0])
    return _compat.multi_with_parts(optimizer, views, counter)


def _part_view(outer: Any, optimizer: Any, steps: int, sums: Sums | None) -> Any:
    """An optimizer with the variables that it would have if Keras accumulated."""
    if sums is None:
        return _compat.as_accumulating(optimizer, steps, None)
    entries = [
        sums.entry(_compat.index_in(outer, variable))
        for variable in _compat.trained_by(optimizer)
    ]
    own = _compat.own_variables(optimizer)
    head = _compat.num_variables_before_accumulators(optimizer)
    variables = [sums.counter(own[0]), *own[1:head], *entries, *own[head:]]
    return _compat.as_accumulating(optimizer, steps, variables)


def inherit(
    optimizer: Any,
    steps: int,
    accumulation: Accumulation | None,
    trained: list[Any],
    scale: float,
) -> None:
    """Takes what a built optimizer has accumulated, and frees its accumulators.

    Args:
        optimizer: Keras optimizer, maybe built for `gradient_accumulation_steps`.
        steps: Int, those.
        accumulation: `Accumulation` to fill, or `None` where there is none.
        trained: List of the variables whose sums it holds.
        scale: Float, the loss scale, by which Keras had divided.
    """
    positions = {id(variable): index for index, variable in enumerate(trained)}
    parts = [part for part in innermost(optimizer) if _compat.has_accumulators(part)]
    for part in parts:
        sums = _compat.take_accumulators(part)
        iterations = _compat.own_variables(part)[0]
        updates, count = divmod(int(iterations.numpy()), steps)
        iterations.assign(updates)
        if accumulation is None:
            continue
        accumulation.count.assign(count)
        for variable, total in zip(_compat.trained_by(part), sums, strict=True):
            if total is not None:
                own = accumulation.sums[positions[id(variable)]]
                _compat.copy_local_parts(total, own, scale)
    if parts and is_multi(optimizer):
        iterations = _compat.own_variables(optimizer)[0]
        iterations.assign(int(iterations.numpy()) // steps)


def scaling_of(optimizer: keras.optimizers.LossScaleOptimizer) -> LossScaling:
    """The settings of Keras's loss scaling."""
    return LossScaling(
        initial_scale=float(optimizer.initial_scale),
        growth_steps=int(optimizer.dynamic_growth_steps),
    )


def take_accumulation_steps(optimizer: Any) -> int:
    """Takes `gradient_accumulation_steps` over from an optimizer or its parts.

    Raises:
        ValueError: If the optimizers of a `MultiOptimizer` have different ones.
    """
    parts = innermost(optimizer)
    found = {part.gradient_accumulation_steps or 1 for part in parts}
    if len(found) > 1:
        raise ValueError(
            "The optimizers of a `MultiOptimizer` must accumulate alike. Received: "
            f"gradient_accumulation_steps={sorted(found)}"
        )
    for part in parts:
        part.gradient_accumulation_steps = None
    return found.pop() if found else 1
