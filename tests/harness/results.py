"""Results of a case in plain form, and what a worker sends back."""

from __future__ import annotations

import collections.abc
import dataclasses
import typing

import numpy as np

# Results under this name may differ between workers and are not compared.
LOCAL = "local"


@dataclasses.dataclass
class Outcome:
    """What one worker made of a case.

    Args:
        results: The flat results, or `None` where the case failed.
        error: The traceback, or `""`.
        is_assertion: Whether the error is a failed assertion of the case.
        seconds: Time that the case took.
        cpu_seconds: Time that the processors worked on it.
    """

    results: dict[str, np.ndarray] | None = None
    error: str = ""
    is_assertion: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def flatten_results(nest: typing.Any, prefix: str = "") -> dict[str, np.ndarray]:
    """Flattens nested dicts to `{"a/b": array}`; lists become one array."""
    if isinstance(nest, collections.abc.Mapping):
        flat: dict[str, np.ndarray] = {}
        for key, value in nest.items():
            flat.update(flatten_results(value, f"{prefix}/{key}" if prefix else key))
        return flat
    return {prefix: np.asarray(nest)}
