"""State of compressors: variables whose values differ between replicas.

A step reads them when it reduces a bucket. New values are assigned only when the step
is known not to be skipped, see `step_residuals`.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.ground import user_code
from tfdp.ground._compat import runtime
from tfdp.training.compression.compressor import Compressor, GradientBucket
from tfdp.training.compression.step_residuals import assign_if_kept


@dataclasses.dataclass(frozen=True)
class BucketKey:
    """Key under which a process finds the compressor states of a bucket.

    Args:
        kind: String, name of the reduction that uses the bucket.
        number: Int, index of the bucket among those of the reduction.
        variables: Tuple of ints, the `id`s of the variables in it, in order.
    """

    kind: str
    number: int
    variables: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ResidualState:
    """Values that a compressor keeps between steps for one bucket, such as its errors.

    Args:
        key: `BucketKey`.
        level: String, level of the reduction: `"inner"`, `"outer"` or `"all"`.
        compressor: String, the `repr` of the compressor.
        refs: Tuple of weak references to the variables of the bucket.
        initial: Dict from names to arrays, the initial values.
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
        """Bool, whether the variables of the bucket still exist."""
        return all(ref() is not None for ref in self.refs)

    def portable_name(self, positions: Mapping[int, int]) -> tuple:
        """Return a name of the state that is valid in other processes, a tuple.

        It consists of the key's `kind` and `number`, the positions of the
        variables in the model, the level and the compressor.

        Args:
            positions: Dict from the `id` of a variable to its position in the model.
        """
        members = tuple(positions[variable] for variable in self.key.variables)
        return self.key.kind, self.key.number, members, self.level, self.compressor

    def reset(self) -> None:
        """Set all values of the state to their initial values on each local replica."""
        for by_name in self.replicas:
            for name, variable in by_name.items():
                assign(variable, self.initial[name])


@dataclasses.dataclass(eq=False)
class RestoredResiduals:
    """Saved compressor states, kept until the trace of a step creates their variables.

    Args:
        positions: Dict from the `id` of a variable to its position in the model.
        values: Dict from a state's key in the checkpoint to its arrays, by name and
            local replica.
        identify: Callable that takes the result of `ResidualState.portable_name` and
            returns the state's key in `values`.
    """

    positions: dict[int, int]
    values: dict[str, dict[str, dict[int, np.ndarray]]]
    identify: Callable[[tuple], str]

    def fill(self, state: ResidualState) -> bool:
        """Assign the saved values of a state to it, if there are any and they fit.

        They are removed from `values`. A warning says if saved values are dropped,
        because they belong to other buckets or another compressor.

        Args:
            state: `ResidualState`.

        Returns:
            Bool, whether the state belongs to the model of the saved values, even if
            nothing was assigned.
        """
        if not self.positions.keys() >= set(state.key.variables):
            return False
        found = self.values.pop(
            self.identify(state.portable_name(self.positions)), None
        )
        if found is None or not _fits(found, state):
            # A state without values, of which nothing is saved, loses nothing.
            if state.initial and (self.values or found):
                user_code.warn(
                    "The saved errors of compressed gradients are dropped, and start "
                    "at zero: they belong to other buckets or another compressor.",
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
    """Store of the states of all compressors of a strategy.

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
        """Return a local replica's view of the compressor states of a bucket.

        States are not created until the view is asked for their variables.

        Args:
            kind: String, name of the reduction that uses the bucket, such as
                `"reduce-scatter"`.
            number: Int, index of the bucket among those of the reduction.
            variables: Sequence of Keras variables, those of the bucket in order.
            replica: Int, index among the local replicas.
        """
        key = BucketKey(kind, number, tuple(map(id, variables)))
        return BucketResiduals(self, key, tuple(variables), replica)

    def state_of(
        self,
        residuals: BucketResiduals,
        level: str,
        compressor: Compressor,
        bucket: GradientBucket,
    ) -> ResidualState:
        """Return the state of a bucket on one level; create it if it does not exist.

        A new state gets the values that `restore` has kept for it, if any.

        Args:
            residuals: `BucketResiduals`, the states of the bucket on a replica.
            level: String, level of the reduction: `"inner"`, `"outer"` or `"all"`.
            compressor: `Compressor`.
            bucket: `GradientBucket` without `flat`.
        """
        with self._lock:
            found = self._states.get((residuals.key, level))
            text = repr(compressor)
            if found is not None and found.is_alive and found.compressor == text:
                return found
            # States whose variables no longer exist are removed, to free their memory.
            self._states = {k: s for k, s in self._states.items() if s.is_alive}
            with tf.init_scope():
                initial = {
                    n: np.asarray(v) for n, v in compressor.state(bucket).items()
                }
            created = ResidualState(
                residuals.key,
                level,
                text,
                tuple(map(weakref.ref, residuals.variables)),
                initial,
                [
                    {
                        name: runtime.plain_variable(
                            array, tf.as_dtype(array.dtype), device
                        )
                        for name, array in initial.items()
                    }
                    for device in self._devices
                ],
            )
            self._states[residuals.key, level] = created
            for restored in reversed(self._restored):
                if restored.fill(created):
                    break
            return created

    def states_within(self, variables: Sequence[Any]) -> list[ResidualState]:
        """Return the states of all buckets whose variables are among the given ones.

        States without values, of compressors that keep none, are left out.

        Args:
            variables: Sequence of Keras variables.

        Returns:
            List of `ResidualState`, in the order of creation.
        """
        known = set(map(id, variables))
        return [
            state
            for state in self._states.values()
            if state.is_alive
            and known.issuperset(state.key.variables)
            and state.initial
        ]

    def reset(self, variables: Sequence[Any]) -> None:
        """Reset the states of a model's buckets, and drop its restored states.

        Args:
            variables: Sequence of Keras variables, those of a model.
        """
        known = set(map(id, variables))
        self._restored = [
            other for other in self._restored if not known >= other.positions.keys()
        ]
        for state in self.states_within(variables):
            state.reset()

    def restore(self, restored: RestoredResiduals) -> None:
        """Assign restored values to existing states, and keep others for new states.

        Existing states of the same model without a restored value are reset.

        Args:
            restored: `RestoredResiduals`.
        """
        self._restored = [
            other for other in self._restored if other.positions != restored.positions
        ]
        for state in self._states.values():
            if state.is_alive and restored.positions.keys() >= set(state.key.variables):
                state.reset()
                restored.fill(state)
        if restored.values:
            self._restored.append(restored)


@dataclasses.dataclass(frozen=True)
class BucketResiduals:
    """Residuals of a gradient bucket on one replica, for each level of its reduction.

    A residual is what compression has left out, which the next step adds.

    Args:
        store: `ResidualStore` that holds their variables.
        key: `BucketKey` under which the store finds them.
        variables: Tuple of Keras variables, those in the bucket.
        replica: Int, index among the local replicas.
    """

    store: ResidualStore
    key: BucketKey
    variables: tuple[Any, ...]
    replica: int

    def variables_of(
        self, level: str, compressor: Compressor, bucket: GradientBucket
    ) -> dict[str, Any]:
        """Return the variables of a level's state on this replica, by name.

        They are created if they do not exist.

        Args:
            level: String, level of the reduction: `"inner"`, `"outer"` or `"all"`.
            compressor: `Compressor` of the level.
            bucket: `GradientBucket` without `flat`.

        Returns:
            Dict from the names in `compressor.state` to variables.
        """
        state = self.store.state_of(self, level, compressor, bucket)
        return state.replicas[self.replica]


def assign_state(
    compressor: Compressor,
    variables: Mapping[str, Any],
    old: Mapping[str, tf.Tensor],
    new: Mapping[str, Any],
) -> None:
    """Assign a new state, unless the step turns out to be skipped.

    Args:
        compressor: `Compressor` that returned the new state.
        variables: Dict from names to the variables of the state.
        old: Dict from names to tensors, the current values.
        new: Dict from names to tensors, the new values.

    Raises:
        ValueError: If `new` has other names, shapes or dtypes than `old`.
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
    """Assign an array to a variable at once, even while a step is traced."""
    with tf.init_scope(), tf.device(variable.device):
        variable.assign(value)


def _fits(restored: dict[str, dict[int, np.ndarray]], state: ResidualState) -> bool:
    """Return whether restored arrays have the names, sizes and dtypes of a state.

    Args:
        restored: Dict from the name of a value to a dict from local replica to array.
        state: `ResidualState`.
    """
    return restored.keys() == state.initial.keys() and all(
        array.size == state.initial[name].size
        and array.dtype == state.initial[name].dtype
        for name, by_replica in restored.items()
        for array in by_replica.values()
    )


def _check_state(
    compressor: Any, new: Mapping[str, Any], old: Mapping[str, Any]
) -> None:
    """Raise unless a new state has the names, shapes and dtypes of the old one.

    Args:
        compressor: `Compressor` that returned the new state.
        new: Dict from names to tensors, the new state.
        old: Dict from names to tensors, the current state.

    Raises:
        ValueError: The message names the class of the compressor.
    """
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
