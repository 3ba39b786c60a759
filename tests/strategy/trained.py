"""What the workers of `mpi_train` have printed, compared with one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.harness.commands import run_python
from tests.harness.mpi import answers

SCRIPT = "tests.strategy.mpi_train"
# What its argument `heavy` adds up.
HEAVY_BYTES = 4 << 20
_DEADLINE_SECONDS = 120.0


def check_answers(
    found: Sequence[dict[str, Any]], num_replicas: int, backend: str
) -> None:
    """Check that each worker has the weights of one device, and all the same.

    Args:
        found: The answer of each worker.
        num_replicas: How many replicas each of them should have seen.
        backend: What should have carried their bytes.
    """
    assert found
    assert {answer["num_replicas"] for answer in found} == {num_replicas}
    assert {answer["backend"] for answer in found} == {backend}
    assert all(answer["weights"] == found[0]["weights"] for answer in found)
    pairs = zip(found[0]["weights"], _weights_of_one_device(), strict=True)
    for weight, alone in pairs:
        scale = max(np.abs(alone).max(), 1e-3)
        assert np.abs(np.array(weight) - alone).max() / scale <= 1e-5


@functools.cache
def _weights_of_one_device() -> list[np.ndarray]:
    finished = run_python("-m", SCRIPT, "alone", deadline_seconds=_DEADLINE_SECONDS)
    (answer,) = answers(finished)
    return [np.array(weight) for weight in answer["weights"]]
