"""Equal division of a global batch among replicas.

The numbers of rows of two replicas differ by one at most.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp.training.data.stages import as_map_function

UNEQUAL_ROWS = (
    "All parts of a batch must have the same number of rows, so that they can be "
    "divided among the replicas."
)
# An assertion in a graph has a message of fixed text, in which this separator joins the
# names of a batch's parts. `checks` splits them at it to write a better message.
BETWEEN_NAMES = " | "


class LocalRowRange(NamedTuple):
    """Range of the rows that one worker has of a global batch, for `rows_of_rank`.

    Args:
        total: Scalar int64 tensor, number of rows of the global batch.
        static_total: Int, number of rows of every global batch, or `None` if it varies.
        first_rank: Int, the replica with the first of the worker's rows.
        is_shared: Bool, whether the rows are copied, because they may share memory with
            a user's array, and not only with a batch that the pipeline has created.
    """

    total: tf.Tensor
    static_total: int | None
    first_rank: int
    is_shared: bool


class OtherRows(NamedTuple):
    """A part of a batch, such as `y`, with another row count than the first part.

    Args:
        rows: Tensor, a replica's share of the part's rows.
    """

    rows: Any


def divide_batches(
    dataset: tf.data.Dataset,
    ranks: list[int],
    num_replicas: int,
    *,
    checks: bool | None = None,
    others: Collection[int] = (),
) -> tf.data.Dataset:
    """Split each global batch into the rows of each rank, and count its rows.

    Args:
        dataset: `tf.data.Dataset` of global batches.
        ranks: List of ints, the replicas whose rows the result has.
        num_replicas: Int, number of replicas on all workers.
        checks: Bool, whether different numbers of rows of a batch's parts are an error.
            Dense parts with another static number of rows are exempt if both numbers
            are multiples of `num_replicas`. Defaults to `None`: only if there are
            several replicas.
        others: Collection of ints, indices of the flattened parts that are divided by
            their own number of rows, and wrapped in `OtherRows`. Defaults to none.

    Returns:
        `tf.data.Dataset` of pairs, as long as `dataset`: a tuple with the rows of each
        rank, and the number of rows of the global batch, a float32 scalar.

    Raises:
        ValueError: If the specs show that the parts of a batch differ in their number
            of rows. If only a batch itself shows it, reading it raises
            `tf.errors.InvalidArgumentError`.
    """
    if checks is None:
        checks = num_replicas > 1
    if checks:
        equal_parts = _parts_of_equal_rows(dataset.element_spec, num_replicas, others)
        check_equal_rows(equal_parts)

    def divide(element: Any) -> Any:
        """Return a tuple of each rank's rows, and the number of rows of the batch."""
        if checks:
            _assert_equal_rows(
                {n: p for n, p in parts_with_rows(element).items() if n in equal_parts}
            )
        parts = tuple(
            _wrap_other_rows(rows_of_rank(element, rank, num_replicas), others)
            for rank in ranks
        )
        # `DeepCopy` is stateful, which keeps TensorFlow from making the `map` parallel.
        # Parallel calls would read ahead from a Python generator, and batches that are
        # read ahead, but not used, would be lost.
        return parts, tf.raw_ops.DeepCopy(x=num_rows(first_tensor(element)))

    return dataset.map(as_map_function(dataset, divide))


def flatten_local_replicas(divided: tf.data.Dataset) -> tf.data.Dataset:
    """Turn each tuple of the ranks' rows into one element per rank.

    Args:
        divided: `tf.data.Dataset` as `divide_batches` returns it.

    Returns:
        `tf.data.Dataset` with an element for each rank of each batch.

    Example:

    >>> batches = tf.data.Dataset.range(5).batch(5)
    >>> rows = flatten_local_replicas(divide_batches(batches, [0, 1], 2))
    >>> [part.tolist() for part in rows.as_numpy_iterator()]
    [[0, 1, 2], [3, 4]]
    """

    def of_ranks(parts: tuple, total: tf.Tensor) -> tf.data.Dataset:
        """Return a dataset with one element for each rank, the rows of the rank.

        Args:
            parts: Tuple of nests, the rows of each rank.
            total: Tensor, number of rows of the global batch; ignored.
        """
        del total
        joined = tf.data.Dataset.from_tensors(parts[0])
        for part in parts[1:]:
            joined = joined.concatenate(tf.data.Dataset.from_tensors(part))
        return joined

    return divided.flat_map(of_ranks)


def rows_of_rank(
    batch: Any, rank: int, num_replicas: int, part: LocalRowRange | None = None
) -> Any:
    """Take the rows of one replica from a nest of batched tensors.

    Args:
        batch: Nest of tensors, ragged or sparse ones too, with the rows along
            the first axis; scalars and `None` are given to every replica.
        rank: Int, the replica.
        num_replicas: Int, number of replicas on all workers.
        part: `LocalRowRange`, the rows of a global batch that `batch` has, or `None`
            if it has all of them. Defaults to `None`.

    Returns:
        Nest like `batch`, with only the rows of `rank`.
    """

    def take(tensor: Any) -> Any:
        """Return the replica's rows of one tensor; a scalar or `None` unchanged."""
        if not has_rows(tensor):
            return tensor
        total = count_of(tensor) if part is None else part.total
        begin, size = _begin_and_size(total, rank, num_replicas)
        if part is not None:
            begin -= _begin_and_size(total, part.first_rank, num_replicas)[0]
        rows = take_rows(tensor, begin, size)
        if isinstance(tensor, tf.RaggedTensor) or tensor.shape.rank is None:
            return rows
        static = tensor.shape[0] if part is None else part.static_total
        shape = [_static_num_rows(static, num_replicas), *tensor.shape[1:]]
        rows.set_shape(shape)
        if isinstance(tensor, tf.SparseTensor):
            return rows
        if shape[0] is None:
            # Hide the static number of rows: replicas with different static numbers
            # could trace different steps, and only some would have a collective.
            rows = tf.compat.v1.placeholder_with_default(rows, shape)
        # A slice shares the memory of the batch, which may be the user's own
        # array; operations that work in place would overwrite it.
        is_shared = part is None or part.is_shared
        return tf.raw_ops.DeepCopy(x=rows) if is_shared and _can_copy(rows) else rows

    return tf.nest.map_structure(take, batch)


def has_rows(tensor: Any) -> bool:
    """Return whether a leaf of a batch is divided among replicas.

    Scalars and specs of `None` are not.
    """
    shape = getattr(tensor, "shape", None)
    return shape is not None and tf.TensorShape(shape).rank != 0


def check_equal_rows(parts: dict[str, Any]) -> None:
    """Raise if parts of a batch are known to have different numbers of rows.

    Args:
        parts: Dict of arrays, tensors or their specs, by name.

    Raises:
        ValueError: If they differ. The message names the rows of each part.

    Example:

    >>> check_equal_rows({"x": tf.zeros([8, 3]), "y": tf.zeros([6])})
    Traceback (most recent call last):
    ...
    ValueError: All parts of a batch must have the same number of rows, so that \
they can be divided among the replicas. Received: x with 8 rows, y with 6
    """
    rows = {name: tf.TensorShape(part.shape)[0] for name, part in parts.items()}
    known = {name: size for name, size in rows.items() if size is not None}
    if len(set(known.values())) > 1:
        raise ValueError(describe_unequal_rows(list(known), list(known.values())))


def describe_unequal_rows(names: list[str], rows: list[int]) -> str:
    """Format the error message of parts of a batch with different numbers of rows.

    Args:
        names: List of strings, the name of each part.
        rows: List of ints, the number of rows of each part.
    """
    (first, most), *others = zip(names, rows, strict=True)
    unit = "row" if most == 1 else "rows"
    listed = [f"{first} with {most} {unit}", *(f"{n} with {r}" for n, r in others)]
    return f"{UNEQUAL_ROWS} Received: {', '.join(listed)}"


def parts_with_rows(batch: Any, name: str = "batch") -> dict[str, Any]:
    """Return the leaves of a batch that are divided among replicas, by name.

    Args:
        batch: Nest of arrays, tensors or their specs.
        name: String, name of the batch. Defaults to `"batch"`.

    Example:

    >>> list(parts_with_rows(({"a": tf.zeros([8, 3])}, None, tf.zeros([8]))))
    ["batch[0]['a']", 'batch[2]']
    """
    leaves = named_leaves(batch, name)
    return {where: leaf for where, leaf in leaves.items() if has_rows(leaf)}


def named_leaves(nest: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of a nest by their paths, such as "x['a'][0]" for name "x"."""
    return {
        name + "".join(f"[{step!r}]" for step in path): leaf
        for path, leaf in keras.tree.flatten_with_path(nest)
    }


def _wrap_other_rows(batch: Any, others: Collection[int]) -> Any:
    """Wrap parts with another number of rows than the first part in `OtherRows`.

    Args:
        batch: Nest of tensors, a replica's rows.
        others: Collection of ints, indices of these parts among the flattened parts.

    Returns:
        Nest like `batch`, for a step, which unwraps it by `unwrap_other_rows`.
    """
    if not others:
        return batch
    parts = [
        OtherRows(part) if place in others else part
        for place, part in enumerate(tf.nest.flatten(batch))
    ]
    return tf.nest.pack_sequence_as(batch, parts)


def _parts_of_equal_rows(
    spec: Any, num_replicas: int, others: Collection[int]
) -> dict[str, Any]:
    """Return the parts of a batch that must have as many rows as its first part.

    A dense part with another static number of rows, as from zipped datasets with
    different batch sizes, is exempt if both numbers are multiples of `num_replicas`.

    Args:
        spec: Nest of type specs of a global batch.
        num_replicas: Int, number of replicas on all workers.
        others: Collection of ints, indices of flattened parts that are exempt, too,
            since they are divided by their own number of rows.

    Returns:
        Dict of type specs by their paths, such as "batch[0]['a']", including that of
        the first part that has rows.
    """
    without_rows = tf.TensorSpec([])
    flat = [
        without_rows if place in others else part
        for place, part in enumerate(tf.nest.flatten(spec))
    ]
    parts = parts_with_rows(tf.nest.pack_sequence_as(spec, flat))
    first = _static_num_rows(
        _first_size(next(iter(parts.values()), None)), num_replicas
    )
    if first is None or num_replicas == 1:
        return parts
    return {
        name: part
        for name, part in parts.items()
        if not isinstance(part, tf.TensorSpec)
        or _static_num_rows(part.shape[0], num_replicas) in (None, first)
    }


def _first_size(part: Any) -> int | None:
    """Return the static number of rows of a tensor or spec; `None` if unknown."""
    return None if part is None else tf.TensorShape(part.shape)[0]


def _assert_equal_rows(parts: dict[str, Any]) -> None:
    """Add an assertion of equal row counts, unless static shapes show that they are.

    Args:
        parts: Dict of tensors by name. The error, raised when the graph runs, has the
            names.
    """
    static = {part.shape[0] for part in parts.values()}
    if len(parts) < 2 or (len(static) == 1 and None not in static):
        return
    counts = tf.stack([count_of(part) for part in parts.values()])
    text = f"{UNEQUAL_ROWS} Received: {BETWEEN_NAMES.join(parts)} with"
    are_equal = tf.reduce_all(counts == counts[0])
    tf.debugging.Assert(are_equal, [text, counts], summarize=len(parts))


def count_of(tensor: Any) -> tf.Tensor:
    """Return the number of rows of a tensor, dense or not: scalar, int64."""
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows()
    return tf.shape(tensor, tf.int64)[0]


def take_rows(tensor: Any, begin: tf.Tensor, size: tf.Tensor) -> Any:
    """Return a range of the rows of a dense, ragged or sparse tensor.

    Args:
        tensor: The tensor.
        begin: Scalar int64 tensor, index of the first row.
        size: Scalar int64 tensor, number of rows.
    """
    if isinstance(tensor, tf.SparseTensor):
        rest = tf.cast(tensor.dense_shape[1:], tf.int64)
        start = tf.concat([[begin], tf.zeros_like(rest)], 0)
        rows = tf.sparse.slice(tensor, start, tf.concat([[size], rest], 0))
        # The slice loses the static length of all axes, which Keras needs for layers.
        rows.set_shape([None, *tensor.shape[1:]])
        return rows
    return tensor[begin : begin + size]


def join_rows(parts: list) -> Any:
    """Return dense, ragged or sparse tensors of one kind, joined along axis 0."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts, expand_nonconcat_dims=True)
    return tf.concat(parts, axis=0)


def first_tensor(batch: Any) -> Any:
    """Return the first tensor of a nest that has rows, or `None`."""
    for item in tf.nest.flatten(batch):
        if tf.is_tensor(item) and item.shape.rank != 0:
            return item
    return None


def num_rows(tensor: Any) -> tf.Tensor:
    """Return the number of rows of a tensor, dense or not: scalar, float32."""
    is_dense = not isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor))
    count = tf.shape(tensor)[0] if is_dense else count_of(tensor)
    return tf.cast(count, tf.float32)


def _begin_and_size(num_rows: Any, rank: int, num_replicas: int) -> tuple[Any, Any]:
    """Return the first row of a replica in a batch, and its number of rows.

    Args:
        num_rows: Int or scalar tensor, rows of the global batch.
        rank: Int, the replica.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        Pair of scalar int64 tensors.
    """
    num_rows = tf.cast(num_rows, tf.int64)
    least, extra = num_rows // num_replicas, num_rows % num_replicas
    begin = rank * least + tf.minimum(tf.cast(rank, tf.int64), extra)
    return begin, least + tf.cast(rank < extra, tf.int64)


def bounds_of_ranks(
    num_rows: Any, ranks: Sequence[int], num_replicas: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute the range of rows that consecutive replicas have of a batch.

    Args:
        num_rows: Int or scalar tensor, rows of the global batch.
        ranks: Sequence of consecutive ints, the ranks of the replicas.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        Pair of scalar int64 tensors, the first row and the one after the last.

    Example:

    >>> [int(bound) for bound in bounds_of_ranks(5, [1, 2], 3)]
    [2, 5]
    """
    begin, _ = _begin_and_size(num_rows, ranks[0], num_replicas)
    last, size = _begin_and_size(num_rows, ranks[-1], num_replicas)
    return begin, last + size


def rows_of_worker(num_rows: int, ranks: Sequence[int], num_replicas: int) -> range:
    """Compute the range of rows that a worker has of a batch, in plain Python.

    Args:
        num_rows: Int, rows of the global batch.
        ranks: Sequence of consecutive ints, the ranks of the replicas.
        num_replicas: Int, number of replicas on all workers.

    Example:

    >>> rows_of_worker(5, [1, 2], 3)
    range(2, 5)
    """
    least, extra = divmod(num_rows, num_replicas)
    begin, end = ranks[0], ranks[-1] + 1
    return range(begin * least + min(begin, extra), end * least + min(end, extra))


def rows_to_read(num_rows: int, ranks: Sequence[int], num_replicas: int) -> range:
    """Return the range of rows that a worker reads of a batch, which is never empty.

    If a batch has fewer rows than replicas, a worker may have no rows of its own. It
    then reads one row of another worker, for the shapes of its empty rows.

    Args:
        num_rows: Int, rows of the global batch, at least 1.
        ranks: Sequence of consecutive ints, the ranks of the worker's replicas.
        num_replicas: Int, number of replicas on all workers.
    """
    own = rows_of_worker(num_rows, ranks, num_replicas)
    start = min(own.start, num_rows - 1)
    return range(start, max(own.stop, start + 1))


def _static_num_rows(batch_rows: int | None, num_replicas: int) -> int | None:
    """Return the static number of rows of every replica; `None` if it may differ.

    `batch_rows` is the static number of rows of the batch, or `None`.
    """
    return (
        None
        if batch_rows is None or batch_rows % num_replicas
        else batch_rows // num_replicas
    )


def _can_copy(tensor: tf.Tensor) -> bool:
    """Return whether the `DeepCopy` operation supports the dtype of a tensor."""
    return tensor.dtype not in (tf.string, tf.resource, tf.variant)
