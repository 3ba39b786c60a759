"""Specs of the elements of a `PerReplicaDataset`, and empty elements of a spec."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp import _compat


def element_spec_of(value: Any, source: Any) -> Any:
    """Return the element spec of a `PerReplicaDataset` or iterator over a source."""
    parts = source.element_spec[0]
    if value.read_options.by_weight:
        any_rows = tf.nest.map_structure(_of_any_rows, parts[0])
        parts = (any_rows,) * value.strategy.extended.num_local
    return _per_replica_spec(parts)


def _of_any_rows(spec: Any) -> Any:
    """Return the spec of any number of rows of a tensor."""
    if not getattr(getattr(spec, "shape", None), "rank", None):
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        kinds = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *kinds)
    return type(spec)(shape, spec.dtype)


def _per_replica_spec(specs: tuple) -> Any:
    if len(specs) == 1:
        return specs[0]

    def of_replicas(*own: Any) -> Any:
        # None is the same object for all replicas, and stays it.
        is_none = isinstance(own[0], _compat.NoneTensorSpec)
        return own[0] if is_none else _compat.PerReplicaSpec(*own)

    return tf.nest.map_structure(of_replicas, *specs)


def empty_of(spec: Any) -> Any:
    """Return an empty batch of a spec, for a worker that has run out of data."""
    if isinstance(spec, _compat.NoneTensorSpec):
        return None
    if isinstance(spec, tf.OptionalSpec):
        return _compat.empty_optional(spec)
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *(size or 0 for size in spec.shape[1:])]
        indices = tf.zeros([0, len(shape)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), shape)
    if isinstance(spec, tf.RaggedTensorSpec):
        rows: list = [[]] if spec.ragged_rank else []
        empty = tf.ragged.constant(rows, spec.dtype, ragged_rank=spec.ragged_rank)
        return empty[:0]
    shape = [0, *(size or 0 for size in spec.shape[1:])] if spec.shape.rank else []
    return tf.zeros(shape, spec.dtype)
