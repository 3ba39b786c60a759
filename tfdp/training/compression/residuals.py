"""State of compressors: variables with a value of their own on each replica.

A step reads them when it reduces a bucket, and assigns what is new only once it is
known that the step is kept, see `step_residuals`.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground import _compat, user_code
from tfdp.training.compression.compressor import Compressor, GradientBucket
from tfdp.training.compression.step_residuals import assign_if_kept


@dataclasses.dataclass(frozen=True)
class BucketKey:
    """Which bucket of which variables a state belongs to.

    Args:
        kind: String, what is done with the bucket.
        number: Int, the bucket's place in its plan.
        variables: Tuple of ints, the `id`s of the variables in it, in order.
    """

    kind: str
    number: int
    variables: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ResidualState:
    """State of one compressor for one bucket.

    Args:
        key: `BucketKey`.
        level: String, the level of the reduction that it belongs to.
        compressor: String, whose it is.
        refs: Tuple of weak references to the variables of the bucket.
        initial: Dict from names to arrays.
        replicas: List with a dict from names to variables for each local replica.
    """

    key: BucketKey
    level: str
    compressor: str
    refs: tuple[Any, ...]
    initial: dict[str, np.ndarray]
    replicas: list[dict[str, Any]]

    @property
    def is_alive(self) -> bool:
        """Bool, whether the variables of the bucket are still there."""
        return all(ref() is not None for ref in self.refs)

    def name_for(self, places: Mapping[int, int]) -> tuple:
        """What identifies it in another process.

        Args:
            places: Dict from the `id` of a variable to its place in the model.
        """
        members = tuple(places[variable] for variable in self.key.variables)
        return self.key.kind, self.key.number, members, self.level, self.compressor

    def reset(self) -> None:
        """Set it to its initial value on each local replica."""
        for own in self.replicas:
            for name, variable in own.items():
                assign(variable, self.initial[name])


@dataclasses.dataclass(eq=False)
class RestoredResiduals:
    """States that were read for a model, until a traced step asks for them.

    Args:
        places: Dict from the `id` of a variable to its place in the model.
        values: Dict from what `ResidualState.name_for` returns, as an identity of
            `identify`, to arrays by name and local replica.
        identify: Callable from what `name_for` returns to that identity.
    """

    places: dict[int, int]
    values: dict[str, dict[str, dict[int, np.ndarray]]]
    identify: Callable[[tuple], str]

    def fill(self, state: ResidualState) -> bool:
        """Give a state its values; return whether this is of its variables."""
        if not self.places.keys() >= set(state.key.variables):
            return False
        found = self.values.pop(self.identify(state.name_for(self.places)), None)
        if found is None or not _fits(found, state):
            if self.values or found:
                user_code.warn(
                    "The errors of compressed gradients that were saved are dropped, "
                    "and begin at zero: they are of other buckets or of another "
                    "compressor.",
                    once_for=self,
                )
            return True
        for name, by_replica in found.items():
            for replica, array in by_replica.items():
                assign(
                    state.replicas[replica][name],
                    array.reshape(state.initial[name].shape),
                )
        return True


class ResidualStore:
    """States of all compressors of a strategy.

    Args:
        devices: Sequence of strings, the device of each local replica.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._states: dict[tuple[BucketKey, str], ResidualState] = {}
        self._restored: list[RestoredResiduals] = []
        self._lock = threading.Lock()

    def of_bucket(
        self, kind: str, number: int, variables: Sequence[Any], replica: int
    ) -> BucketResiduals:
        """Return the states of a bucket as a local replica uses them.

        Args:
            kind: String, see `BucketKey`.
            number: Int, see `BucketKey`.
            variables: Sequence of Keras variables, those of the bucket in order.
            replica: Int, index among the local replicas.
        """
        key = BucketKey(kind, number, tuple(map(id, variables)))
        return BucketResiduals(self, key, tuple(variables), replica)

    def state_of(
        self,
        own: BucketResiduals,
        level: str,
        compressor: Compressor,
        bucket: GradientBucket,
    ) -> ResidualState:
        """Return a state, made with its initial value where there is none yet."""
        with self._lock:
            found = self._states.get((own.key, level))
            text = repr(compressor)
            if found is not None and found.is_alive and found.compressor == text:
                return found
            self._drop_dead()
            with tf.init_scope():
                given = {n: np.asarray(v) for n, v in compressor.state(bucket).items()}
            made = ResidualState(
                own.key,
                level,
                text,
                tuple(map(weakref.ref, own.variables)),
                given,
                [
                    {name: _variable(array, device) for name, array in given.items()}
                    for device in self._devices
                ],
            )
            self._states[own.key, level] = made
            for restored in reversed(self._restored):
                if restored.fill(made):
                    break
            return made

    def states_within(self, variables: Sequence[Any]) -> list[ResidualState]:
        """Return the states of buckets of some variables, in the order of creation."""
        known = set(map(id, variables))
        return [
            state
            for state in self._states.values()
            if state.is_alive
            and known.issuperset(state.key.variables)
            and state.initial
        ]

    def restore(self, restored: RestoredResiduals) -> None:
        """Take values that were read: now where there is a state, later elsewhere.

        States of the same variables that have none begin again.
        """
        self._restored = [
            other for other in self._restored if other.places != restored.places
        ]
        for state in self._states.values():
            if state.is_alive and restored.places.keys() >= set(state.key.variables):
                state.reset()
                restored.fill(state)
        if restored.values:
            self._restored.append(restored)

    def _drop_dead(self) -> None:
        dead = [key for key, state in self._states.items() if not state.is_alive]
        for key in dead:
            del self._states[key]


@dataclasses.dataclass(frozen=True)
class BucketResiduals:
    """States of one bucket on one replica.

    Args:
        store: `ResidualStore`.
        key: `BucketKey`.
        variables: Tuple of Keras variables.
        replica: Int, index among the local replicas.
    """

    store: ResidualStore
    key: BucketKey
    variables: tuple[Any, ...]
    replica: int

    def variables_of(
        self, level: str, compressor: Compressor, bucket: GradientBucket
    ) -> dict[str, Any]:
        """The state of a level: variables by name."""
        state = self.store.state_of(self, level, compressor, bucket)
        return state.replicas[self.replica]


def assign_state(
    compressor: Compressor,
    variables: Mapping[str, Any],
    old: Mapping[str, tf.Tensor],
    new: Mapping[str, Any],
) -> None:
    """Assign a new state, once it is known that the step is kept.

    Args:
        compressor: `Compressor` that returned it.
        variables: Dict from names to variables.
        old: Dict from names to tensors, what they held.
        new: Dict from names to tensors.
    """
    _check_state(compressor, new, old)
    assign_if_kept(
        [
            (variables[name], tf.convert_to_tensor(value))
            for name, value in new.items()
            if value is not old[name]
        ]
    )


def assign(variable: Any, value: np.ndarray) -> None:
    """Assign an array to a variable, outside a step or while one is traced."""
    with tf.init_scope(), tf.device(variable.device):
        variable.assign(value)


def _variable(array: np.ndarray, device: str) -> Any:
    return _compat.plain_variable(array, tf.as_dtype(array.dtype), device)


def _fits(found: dict[str, dict[int, np.ndarray]], state: ResidualState) -> bool:
    return found.keys() == state.initial.keys() and all(
        array.size == state.initial[name].size
        and array.dtype == state.initial[name].dtype
        for name, by_replica in found.items()
        for array in by_replica.values()
    )


def _check_state(
    compressor: Any, new: Mapping[str, Any], old: Mapping[str, Any]
) -> None:
    """Raise unless a new state has the names, shapes and dtypes of the old one."""
    what = f"The new state that `{type(compressor).__name__}` returned"
    if new.keys() != old.keys():
        raise ValueError(
            f"{what} must have the names that `state` gave, {sorted(old)}. "
            f"Received: {sorted(new)}"
        )
    for name, before in old.items():
        after = tf.convert_to_tensor(new[name])
        if after.dtype != before.dtype or not after.shape.is_compatible_with(
            before.shape
        ):
            raise ValueError(
                f"{what} must keep shape {before.shape} and {before.dtype.name} of "
                f"{name!r}. Received: shape {after.shape} and {after.dtype.name}"
            )
