"""Files hold the user's own optimizer, so that plain Keras opens them.

A `DistributedOptimizer` shows itself to Keras's saving and loading as the optimizer
that it wraps: accumulation as `gradient_accumulation_steps`, loss scaling as a
`LossScaleOptimizer` around it. What is loaded goes back the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from tfdp import _compat
from tfdp.accumulate import Accumulation
from tfdp.features import Features
from tfdp.loss_scale import LossScale, LossScaling
from tfdp.ownership import is_ours
from tfdp.traits import innermost, is_multi


@functools.cache
def install() -> None:
    """Replaces Keras's functions, once for a process."""
    for owner, name in _compat.SAVING_FUNCTIONS:
        _compat.replace(owner, name, _with_plain_optimizer)
    _compat.replace(_compat.BaseTrainer, "compile", _unwrap_after_compile)
    base = _compat.BaseOptimizer
    _compat.replace(base, "save_own_variables", _save_own_variables)
    _compat.replace(base, "load_own_variables", _load_own_variables)


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


def plain_view(optimizer: Any, features: Features, num_replicas: int) -> Any:
    """An optimizer as a file should hold it, sharing the state of another.

    Args:
        optimizer: The user's Keras optimizer, built or not.
        features: `Features` of the `DistributedOptimizer` around it.
        num_replicas: Int.

    Returns:
        A Keras optimizer of the same class, or a `LossScaleOptimizer` around it.
    """
    view = optimizer
    if features.steps > 1:
        view = _accumulating(optimizer, features, num_replicas)
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


@dataclasses.dataclass(frozen=True)
class _Sums:
    """What has been accumulated, as one device would hold it."""

    accumulation: Accumulation
    scale: LossScale | None
    num_replicas: int

    @property
    def steps(self) -> int:
        return int(self.accumulation.steps.numpy())

    def entry(self, index: int) -> Entry:
        """The sum over replicas: while nothing is under way each holds its N-th.

        Keras accumulates unscaled gradients, tfdp scaled ones.
        """
        variable = self.accumulation.sums[index]

        def factor() -> float:
            return 1.0 if self.scale is None else float(self.scale.value.numpy())

        def read() -> np.ndarray:
            total = _compat.sum_of_local_parts(variable, self.num_replicas)
            total = total / np.asarray(factor(), total.dtype)
            # An overflow would be skipped here; Keras looks at new gradients only.
            return total if np.isfinite(total).all() else np.zeros_like(total)

        def write(value: Any) -> None:
            variable.assign(np.asarray(value) * (factor() / self.num_replicas))

        return Entry(variable.path, tuple(variable.shape), read, write)

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


def _accumulating(optimizer: Any, features: Features, num_replicas: int) -> Any:
    sums = None
    if features.accumulation is not None:
        sums = _Sums(features.accumulation, features.scale, num_replicas)
    parts = innermost(optimizer)
    views = {id(p): _part_view(optimizer, p, features.steps, sums) for p in parts}
    if not is_multi(optimizer):
        return views[id(optimizer)]
    counter = sums and sums.counter(_compat.own_variables(optimizer)[0])
    return _compat.multi_with_parts(optimizer, views, counter)


def _part_view(outer: Any, optimizer: Any, steps: int, sums: _Sums | None) -> Any:
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


def _save_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Writes the sums of all replicas where Keras's own accumulators differ."""
    sums = _accumulators_of_replicas(optimizer)
    if not sums:
        original(optimizer, store)
        return
    replicas = _num_replicas(optimizer)
    for index, variable in enumerate(optimizer.variables):
        is_sum = any(variable is item for item in sums)
        value = (
            _compat.sum_of_local_parts(variable, replicas)
            if is_sum
            else variable.numpy()
        )
        store[str(index)] = value


def _load_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Gives each replica its part of what one device had accumulated."""
    original(optimizer, store)
    for variable in _accumulators_of_replicas(optimizer):
        variable.assign(variable.numpy() / _num_replicas(optimizer))


def _accumulators_of_replicas(optimizer: Any) -> list:
    if _num_replicas(optimizer) == 1 or not _compat.has_accumulators(optimizer):
        return []
    return _compat.accumulators(optimizer)


def _num_replicas(optimizer: Any) -> int:
    strategy = _compat.strategy_of_optimizer(optimizer)
    return strategy.num_replicas_in_sync if is_ours(strategy) else 1


def _with_plain_optimizer(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Calls a function of Keras that saves or loads with the plain optimizer."""
    with _plain_optimizer(model):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def _plain_optimizer(model: Any) -> Iterator[None]:
    optimizer: Any = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "as_keras"):
        yield
        return
    with _compat.replaced_optimizer(model, optimizer.as_keras()):
        yield


def _unwrap_after_compile(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Takes off the `LossScaleOptimizer` that `compile` puts around float16."""
    result = original(model, *args, **kwargs)
    outer = model.optimizer
    is_scaled = isinstance(outer, keras.optimizers.LossScaleOptimizer)
    inner: Any = getattr(outer, "inner_optimizer", None)
    if is_scaled and hasattr(inner, "as_keras"):
        if inner.loss_scaling is None:
            inner.loss_scaling = scaling_of(outer)
        model.optimizer = inner
    return result


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
