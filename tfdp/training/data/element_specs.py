"""Specs of the elements of a `PerReplicaDataset`, and empty elements of a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdp.ground._compat import tf_data
from tfdp.training.data.rows import named_leaves


def element_spec_of(value: Any, source: Any) -> Any:
    """Return the nest of specs of a `PerReplicaDataset`'s or its iterator's element.

    Args:
        value: `PerReplicaDataset` or `PerReplicaIterator`.
        source: The `tf.data.Dataset` or `tf.data.Iterator` that it wraps.
    """
    parts = source.element_spec[0]
    if value.read_options.by_weight:
        any_rows = tf.nest.map_structure(_with_any_row_count, parts[0])
        parts = (any_rows,) * value.strategy.extended.num_local
    return _per_replica_spec(parts)


def _with_any_row_count(spec: Any) -> Any:
    """Return a spec with an unknown number of rows; unchanged for a scalar."""
    if not getattr(getattr(spec, "shape", None), "rank", None):
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        kinds = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *kinds)
    return type(spec)(shape, spec.dtype)


def _per_replica_spec(specs: tuple) -> Any:
    """Merge the local replicas' nests of specs into one nest of per-replica specs.

    A single nest is returned unchanged.
    """
    if len(specs) == 1:
        return specs[0]

    def of_replicas(*own: Any) -> Any:
        """Return the per-replica spec of one part of an element.

        `own` are the specs of the part on each local replica. A spec of `None` is
        returned as it is.
        """
        # TensorFlow keeps a single `None` for all replicas, so its spec is not per
        # replica.
        is_none = isinstance(own[0], tf_data.NoneTensorSpec)
        return own[0] if is_none else tf_data.PerReplicaSpec(*own)

    return tf.nest.map_structure(of_replicas, *specs)


def empty_of(spec: Any) -> Any:
    """Return a tensor of a spec without rows, for a worker that is out of data.

    It is `None` for a spec of `None`.
    """
    if isinstance(spec, tf_data.NoneTensorSpec):
        return None
    if isinstance(spec, tf.OptionalSpec):
        return tf_data.empty_optional(spec)
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


def describe_spec(spec: Any) -> dict[str, Any]:
    """Describe the spec of an element, for comparison by workers.

    Args:
        spec: Nest of type specs.

    Returns:
        Dict for JSON, with the description of each part by its path. The number of rows
        is `None` in every shape.

    Example:

    >>> describe_spec({"a": tf.TensorSpec([8, 3])})
    {"['a']": {'kind': 'TensorSpec', 'dtype': 'float32', 'shape': [None, 3]}}
    """
    return {where: _describe_leaf(leaf) for where, leaf in named_leaves(spec).items()}


def _describe_leaf(spec: Any) -> dict[str, Any]:
    """Return kind, dtype and shape of a spec, as `describe_spec` returns them.

    The number of rows is `None` in the shape. A property that the spec lacks is `None`.
    """
    shape = getattr(spec, "shape", None)
    sizes = None
    if isinstance(shape, tf.TensorShape) and shape.rank is not None:
        sizes = [None, *shape.as_list()[1:]] if shape.rank else []
    dtype = getattr(getattr(spec, "dtype", None), "name", None)
    return {"kind": type(spec).__name__, "dtype": dtype, "shape": sizes}


def without_unknown_sizes(described: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace axis sizes in described specs by `None` unless all workers know them.

    Args:
        described: Sequence of dicts that `describe_spec` returned on each worker.

    Example:

    >>> parts = [{"": {"shape": [None, 3, 4]}}, {"": {"shape": [None, 3, None]}}]
    >>> without_unknown_sizes(parts)[0]
    {'': {'shape': [None, 3, None]}}
    """
    return [
        {
            name: leaf
            | {"shape": _commonly_known_sizes(leaf["shape"], name, described)}
            for name, leaf in own.items()
        }
        for own in described
    ]


def _commonly_known_sizes(
    own_sizes: list | None, name: str, described: Sequence[dict[str, Any]]
) -> list | None:
    """Return a worker's axis sizes of a part, `None` where another has `None`.

    Args:
        own_sizes: List with the axis sizes of the part on one worker, or `None`.
        name: String, path of the part.
        described: Sequence of dicts that `describe_spec` returned on each worker.

    Returns:
        List of sizes, or `None` if a worker knows no shape; `own_sizes` if the shapes
        of the workers differ in rank.
    """
    others = [each[name]["shape"] for each in described if name in each]
    if own_sizes is None or None in others:
        return None
    if any(len(other) != len(own_sizes) for other in others):
        return own_sizes
    return [
        None if None in sizes else size
        for size, *sizes in zip(own_sizes, *others, strict=True)
    ]
