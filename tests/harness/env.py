"""What a case is given: its strategy, its rank, a directory, and readers."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import typing

import numpy as np
import tensorflow as tf

from tests.harness import strategies
from tests.harness.setups import Setup
from tests.harness.timing import wait_until


@dataclasses.dataclass
class Env:
    """The surroundings of one run of a case on one worker.

    Args:
        setup: The set-up that the case runs on.
        rank: Index of this worker.
        strategy: The strategy, or `None` on the reference.
        tmp: A directory that all workers of this run share, empty at first.
        flavor: `"tfdp"` or `"stock"`.
    """

    setup: Setup
    rank: int
    strategy: tf.distribute.Strategy | None
    tmp: pathlib.Path
    flavor: str = "tfdp"

    @property
    def is_reference(self) -> bool:
        """Whether this is the run on one device."""
        return self.strategy is None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first."""
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        """Number of replicas over all workers."""
        return self.setup.num_replicas

    @property
    def distribution(self) -> tf.distribute.Strategy:
        """The strategy, or TensorFlow's default one on the reference."""
        return self.strategy or tf.distribute.get_strategy()

    def scope(self) -> typing.ContextManager:
        """The scope of the strategy, or a context that does nothing."""
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def new_strategy(self) -> tf.distribute.Strategy | None:
        """A second strategy of the same kind."""
        return strategies.make_strategy(self.setup, self.flavor)

    def local_values(self, value: typing.Any) -> list[np.ndarray]:
        """The value on each replica of this worker."""
        parts = self.distribution.experimental_local_results(value)
        return [np.asarray(part) for part in parts]

    def read(self, variables: typing.Iterable) -> dict[str, np.ndarray]:
        """Reads Keras variables by path; local replicas must agree exactly."""
        values = {}
        for variable in variables:
            path = variable.path
            while path in values:
                path += "+"
            self._check_replicas_agree(variable)
            values[path] = np.array(variable.numpy())
        return values

    def weights(self, model: typing.Any) -> dict[str, np.ndarray]:
        """Reads all weights of a model by path."""
        return self.read(model.weights)

    def _check_replicas_agree(self, variable: typing.Any) -> None:
        value = variable.value
        on_read = tf.VariableSynchronization.ON_READ
        if getattr(value, "synchronization", None) == on_read:
            return
        if getattr(value, "has_parts", False):
            return  # a sharded parameter, of which each replica holds a part
        first, *others = self.local_values(value)
        for index, other in enumerate(others, start=1):
            np.testing.assert_array_equal(
                other,
                first,
                err_msg=f"{variable.path} on local replica {index}",
            )

    def wait_for_all(self, label: str, timeout_seconds: float = 30.0) -> None:
        """Waits, by files and not by collectives, until all workers are here."""
        (self.tmp / f".{label}.{self.rank}").touch()
        files = [self.tmp / f".{label}.{r}" for r in range(self.setup.num_workers)]
        wait_until(
            lambda: all(file.exists() for file in files),
            f"all workers at {label!r}",
            timeout_seconds,
        )
