"""Checks of what compressors return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def check_result(
    compressor: Any, method: str, result: Any, size: int, dtype: Any
) -> None:
    """Raise unless a compressor returned a tensor of the right shape, and a state.

    Args:
        compressor: `Compressor`.
        method: String, the method that was called.
        result: What it returned.
        size: Int, the elements that the sum must have.
        dtype: `tf.DType` that it must have.
    """
    what = f"`{type(compressor).__name__}.{method}`"
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not is_pair or not isinstance(result[1], Mapping):
        raise ValueError(
            f"{what} must return a tensor and a dict, the new state. "
            f"Received: {type(result).__name__}"
        )
    total = result[0]
    shape, kind = getattr(total, "shape", None), getattr(total, "dtype", None)
    if not tf.is_tensor(total) or shape != tf.TensorShape([size]) or kind != dtype:
        raise ValueError(
            f"{what} must return a sum of shape ({size},) and {dtype.name}, like the "
            f"bucket. Received: shape {shape} and {getattr(kind, 'name', kind)}"
        )


def check_state(
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
