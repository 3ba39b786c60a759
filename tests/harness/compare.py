"""The error measure, and what equal results are."""

from __future__ import annotations

import collections.abc
import fnmatch

import numpy as np

from tests.harness.results import LOCAL

Results = collections.abc.Mapping[str, np.ndarray]


def error_of_tensor(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns `max|a-b| / max(max|b|, 1e-3)`; infinite where only one is finite."""
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    if actual.size == 0:
        return 0.0
    finite = np.isfinite(expected)
    same = np.array_equal(actual[~finite], expected[~finite], equal_nan=True)
    if not same or not np.isfinite(actual[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    difference = np.abs(actual[finite] - expected[finite]).max()
    return float(difference / max(np.abs(expected[finite]).max(), 1e-3))


def assert_equal_results(
    results: Results,
    reference: Results,
    tol: float = 1e-5,
    skip: collections.abc.Iterable[str] = (),
) -> None:
    """Asserts that results equal those of one device.

    Args:
        results: Flat results by name.
        reference: Flat results of one device.
        tol: Largest error of a tensor of floats; all else must be the same.
        skip: Names (`fnmatch` patterns) that are left out.

    Raises:
        AssertionError: With every name that differs.
    """
    skip = (f"{LOCAL}/*", LOCAL, *skip)
    results, reference = _without(results, skip), _without(reference, skip)
    assert sorted(results) == sorted(reference), "names of results differ"
    faults = [
        f"{name}: {fault}"
        for name in sorted(results)
        if (fault := _fault(results[name], reference[name], tol))
    ]
    assert not faults, "differs from one device:\n  " + "\n  ".join(faults)


def assert_same_on_all_workers(all_results: collections.abc.Sequence[Results]) -> None:
    """Asserts that every worker holds bit for bit the results of worker 0."""
    skip = (f"{LOCAL}/*", LOCAL)
    first = _without(all_results[0], skip)
    for rank, other in enumerate(all_results[1:], start=1):
        other = _without(other, skip)
        assert sorted(other) == sorted(first), f"names differ on worker {rank}"
        for name, value in first.items():
            np.testing.assert_array_equal(
                other[name],
                value,
                err_msg=f"{name} of worker {rank} differs from worker 0",
            )


def _without(results: Results, patterns: collections.abc.Iterable[str]) -> dict:
    return {
        name: value
        for name, value in results.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def _fault(actual: np.ndarray, expected: np.ndarray, tol: float) -> str:
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if not np.issubdtype(expected.dtype, np.floating):
        same = np.array_equal(actual, expected)
        return "" if same else f"{_short(actual)}, expected {_short(expected)}"
    error = error_of_tensor(actual, expected)
    if error <= tol:
        return ""
    return (
        f"error {error:.2g} > {tol:.2g}: {_short(actual)}, expected {_short(expected)}"
    )


def _short(value: np.ndarray) -> str:
    text = np.array2string(value.ravel()[:6], precision=7, separator=", ")
    return text if value.size <= 6 else f"{text[:-1]}, ...]"
