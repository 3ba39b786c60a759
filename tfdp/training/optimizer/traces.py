"""Settings that a step was traced with, and functions that run on every replica."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground import _compat


class Traces:
    """Settings of the last trace, out of reach of Keras's tracking."""

    def __init__(self) -> None:
        self.features: tuple | None = None
        self.variables: list[Any] | None = None
        self._functions: dict[tuple, Any] = {}

    def note(self, features: tuple, variables: list) -> None:
        """Remember what is being traced."""
        self.features = features
        self.variables = list(variables)

    def drop(self) -> None:
        """Forget the functions, and with them the variables that they use.

        A step that was traced is traced again.
        """
        self._functions.clear()
        if self.features is not None:
            self.features = ()

    def run(self, optimizer: Any, name: str, function: Any) -> None:
        """Run a function on every replica, as a graph that is made once."""
        strategy = _compat.strategy_of_optimizer(optimizer)
        key = (
            name,
            self.features,
            optimizer.is_sharded,
            tuple(map(id, self.variables or ())),
        )
        if key not in self._functions:

            @tf.function(autograph=False)
            def on_replicas() -> None:
                strategy.run(function)

            self._functions[key] = on_replicas
        self._functions[key]()
