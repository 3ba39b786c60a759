"""Data adapters of Keras's loops that read only the rows of this worker's replicas.

Keras wraps the data of `fit`, `evaluate` and `predict` in a data adapter. For these
kinds of data tfdp creates an adapter that reads only this worker's rows:

    PyDataset    with the methods `num_rows(index)`, and `rows(index, start, stop)` for
                 the rows from `start` to `stop` of batch `index`
    DataLoader   of torch, see `loader_rows`
    arrays       in files: memory maps and HDF5 datasets, which Keras would copy into
                 memory. Keras's adapter shuffles and batches row numbers in their
                 place; each worker takes its part of the numbers (`early_rows`) and
                 reads those rows
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.facts import SharedFact, compare, digest
from tfdp.ground import user_code
from tfdp.ground._compat import keras_data, tf_data
from tfdp.ground.base import loops
from tfdp.ground.text import pluralize
from tfdp.training.data.batch_labels import LabelRecord
from tfdp.training.data.early_rows import divide_local_rows
from tfdp.training.data.element_specs import describe_spec
from tfdp.training.data.per_replica_dataset import ReadOptions, distribute_divided
from tfdp.training.data.rows import rows_to_read
from tfdp.training.data.stages import no_autograph

# Before the first step workers compare the row counts of at most this many batches,
# because each count takes a call of the user's `num_rows`.
_COMPARED_BATCHES = 10_000
_PARTS = ("x", "y", "sample_weight")
# NumPy's dtype kinds of booleans, integers and floats. Only arrays of these kinds are
# read from files row by row; Keras copies all others into memory.
_NUMBER_KINDS = "biuf"


def new_label_record(*, restarts: bool) -> LabelRecord:
    """Create an empty record of a data source's class labels, which workers compare.

    If the running loop of Keras is a `fit` that has not read its training data yet, the
    data is for training, and the record is stored as the loop's `label_record`.

    Args:
        restarts: Bool, whether each epoch begins a new pass over the data.
    """
    record = LabelRecord(restarts=restarts)
    if (loop := loops.awaiting_training_data()) is not None:
        loop.label_record = record
    return record


def distribute_local_rows(
    strategy: Any, kind: str, describe: Callable[[], tuple]
) -> Any:
    """Distribute a dataset of this worker's rows.

    Args:
        strategy: A tfdp strategy of several workers.
        kind: String, the kind of data for messages, such as `"PyDatasets"`.
        describe: Function without arguments, which returns a `tf.data.Dataset` of dicts
            as `item_of` builds them, with this worker's rows of a batch and the number
            of rows of the whole batch; and a description, which must be the same on all
            workers.

    Returns:
        Distributed dataset of the rows of each local replica.

    Raises:
        ValueError: On all workers, if `describe` raises one on any worker, or if the
            descriptions differ.
    """
    items = _build_and_compare(strategy, kind, describe)
    items, is_ahead = tf_data.without_automatic_prefetch(items)
    pairs = items.map(lambda item: (item["rows"], item["total"][0]))
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    divided = divide_local_rows(pairs, ranks, num_replicas)
    if is_ahead:
        # TensorFlow tunes the read-ahead of Keras's prefetch on each worker by itself,
        # so the user's Python code, and its random generators, would run ahead by
        # different numbers of batches. A prefetch of one batch replaces Keras's.
        divided = divided.prefetch(1)
    # Workers have compared their numbers of batches, which are part of the description,
    # so no step has to synchronize the end of the data.
    return distribute_divided(
        strategy, divided, None, ReadOptions(syncs_end_of_data=False)
    )


def _build_and_compare(strategy: Any, kind: str, describe: Callable[[], tuple]) -> Any:
    """Build this worker's dataset; raise on all workers if one fails or data differs.

    Args:
        strategy: A tfdp strategy of several workers.
        kind: String, the kind of data for messages, such as `"PyDatasets"`.
        describe: Function without arguments that returns the dataset and a description
            of its batches, which must be the same on all workers.

    Returns:
        `tf.data.Dataset` of dicts of this worker's rows and their total.
    """
    worker_group = strategy.extended.worker_group
    dataset = None
    try:
        dataset, description = describe()
        problem = None
    except ValueError as error:
        description, problem = None, str(error)

    def raise_first(problems: Sequence[str | None]) -> None:
        """Raise a `ValueError` with the first worker's problem that is not `None`."""
        for rank, text in enumerate(problems):
            if text is not None:
                raise ValueError(f"Worker {rank} cannot read its rows: {text}")

    fact = SharedFact(
        "batches",
        description,
        f"Workers have different {kind}. Each reads its own rows of every batch, so "
        "that all need the same batches.",
    )
    moment = f"the batches of {kind}"
    compare(worker_group, moment, [fact], problem, before=raise_first)
    return dataset


def item_of(rows: Any, total: int) -> dict[str, Any]:
    """Return a dict of a worker's `rows`, and of `total` as an int64 array of one item.

    `total` is the number of rows of the global batch.
    """
    return {"rows": rows, "total": np.array([total], "int64")}


class LocalRowsDataset(keras.utils.PyDataset):
    """`PyDataset` of one worker's rows of each batch of another `PyDataset`.

    Args:
        source: `keras.utils.PyDataset` of the user, with `rows` and `num_rows`.
        ranks: Sequence of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.
    """

    def __init__(self, source: Any, ranks: Sequence[int], num_replicas: int) -> None:
        super().__init__(
            source.workers, source.use_multiprocessing, source.max_queue_size
        )
        self.source = source
        self.ranks = list(ranks)
        self.num_replicas = num_replicas

    @property
    def num_batches(self) -> int | None:
        """Int, number of batches of an epoch, or `None` if the data has no end."""
        return self.source.num_batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return this worker's rows of a batch, and the total number of rows.

        A worker without rows in a batch reads one row, to know the shapes. The method
        calls no TensorFlow operation, because Keras may run it in a forked process.
        """
        total = _num_rows_of(self.source, index)
        numbers = rows_to_read(total, self.ranks, self.num_replicas)
        rows = self.source.rows(index, numbers.start, numbers.stop)
        _check_rows(self.source, index, numbers.start, numbers.stop, rows)
        return item_of(rows, total)

    def on_epoch_begin(self) -> None:
        """Call `on_epoch_begin` of the user's `PyDataset`."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Call `on_epoch_end` of the user's `PyDataset`."""
        self.source.on_epoch_end()


def rows_of_py_dataset(strategy: Any, source: Any, arguments: dict[str, Any]) -> Any:
    """Return a Keras data adapter of this worker's rows of a `PyDataset` with `rows`.

    Args:
        strategy: A tfdp strategy of several workers.
        source: `keras.utils.PyDataset` with `rows` and `num_rows`.
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """
    ranks = strategy.extended.local_ranks
    dataset = LocalRowsDataset(source, ranks, strategy.num_replicas_in_sync)
    adapter = keras_data.RowsOfPyDatasetAdapter(
        dataset,
        class_weight=arguments.get("class_weight"),
        shuffle=bool(arguments.get("shuffle")),
    )
    # `make` calls the user's `rows` for two batches, from which Keras finds the spec,
    # and `rows` may fail on one worker. So `make` is called in `describe`, whose errors
    # are raised on all workers.
    make = adapter.get_tf_dataset

    def describe() -> tuple:
        """Return a pair: the dataset of this worker's rows, and facts to compare.

        The facts are a dict that must be the same on all workers.
        """
        facts = describe_batches(dataset)
        items = make()
        return items, facts | {"batch": describe_spec(items.element_spec["rows"])}

    adapter.get_tf_dataset = lambda: distribute_local_rows(
        strategy, "PyDatasets", describe
    )
    adapter.user_data = source
    return adapter


def supports_row_reads(source: Any) -> bool:
    """Return whether data is a `PyDataset` with the methods `rows` and `num_rows`.

    The signature of `rows` must accept `(index, start, stop)`, which an unrelated
    attribute of this name does not. The user is warned of a `PyDataset` with `rows` but
    without `num_rows`.
    """
    if not isinstance(source, keras.utils.PyDataset):
        return False
    if not _accepts_positions(source, "rows", 0, 0, 1):
        return False
    if _accepts_positions(source, "num_rows", 0):
        return True
    user_code.warn(
        f"Each worker reads whole batches of {type(source).__name__}, and not only its "
        "own rows: it has `rows(index, start, stop)` but no `num_rows(index)`. Add it, "
        "to return the number of rows of a batch."
    )
    return False


def describe_batches(dataset: LocalRowsDataset) -> dict[str, Any]:
    """Describe the number of batches and their row counts, for comparison by workers.

    Returns:
        Dict with "number of batches", an int or `None` for data without end, and with
        "number of rows" and "digest of the rows of each batch" of the first batches: at
        most `_COMPARED_BATCHES`, or two without an end.

    Raises:
        ValueError: If the number of rows of a batch is not a positive integer.
    """
    num_batches = dataset.num_batches
    known = 2 if num_batches is None else min(num_batches, _COMPARED_BATCHES)
    rows = [_num_rows_of(dataset.source, index) for index in range(known)]
    return {
        "number of batches": num_batches,
        "number of rows": sum(rows),
        "digest of the rows of each batch": digest(rows),
    }


def _num_rows_of(source: Any, index: int) -> int:
    """Return the row count of a batch, from `num_rows` of the user's `PyDataset`.

    Raises:
        ValueError: If it is not an integer of at least 1.
    """
    count = source.num_rows(index)
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ValueError(
            f"`num_rows` of {type(source).__name__} must return the number of rows of "
            f"a batch, an integer of 1 or more. Received: num_rows({index})={count!r}"
        )
    return int(count)


def _accepts_positions(source: Any, name: str, *positions: int) -> bool:
    """Return whether an object has a method that accepts these positional arguments."""
    try:
        inspect.signature(getattr(source, name)).bind(*positions)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _check_rows(source: Any, index: int, start: int, stop: int, rows: Any) -> None:
    """Raise if `rows` of the user's class returned a wrong number of rows.

    Args:
        source: The user's `PyDataset`.
        index: Int, index of the batch.
        start: Int, first row that was requested.
        stop: Int, one after the last row that was requested.
        rows: Nest of arrays that `rows` returned.
    """
    parts = [part for part in keras.tree.flatten(rows) if getattr(part, "shape", None)]
    counts = [int(part.shape[0]) for part in parts]
    if not counts or any(count != stop - start for count in counts):
        raise ValueError(
            f"`rows({index}, {start}, {stop})` of {type(source).__name__} must return "
            f"{pluralize(stop - start, 'row')} in each part of the batch. Received: "
            f"parts with these numbers of rows: {counts}"
        )


class StoredRows:
    """Reader of the rows of an array in a file.

    Args:
        array: `np.memmap` or `h5py.Dataset`.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        is_float = array.dtype.kind == "f"
        self._dtype = tf.as_dtype(keras.config.floatx() if is_float else array.dtype)

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return a tensor of rows, which a graph reads from the file when it runs.

        Args:
            numbers: Tensor of shape `[num]`, int64, distinct row numbers.
        """
        rows = tf.numpy_function(self.read, [numbers], self._dtype, stateful=False)
        return tf.ensure_shape(rows, [numbers.shape[0], *self._array.shape[1:]])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Return rows as a NumPy array, in the order of `numbers`.

        Args:
            numbers: Array of shape `[num]`, int64, distinct row numbers.
        """
        dtype = self._dtype.as_numpy_dtype
        if len(numbers) == 0:
            return np.zeros([0, *self._array.shape[1:]], dtype)
        order = np.argsort(numbers)
        rising = numbers[order]
        first, last = int(rising[0]), int(rising[-1])
        # HDF5 accepts a list of row numbers only in rising order, and reads a range of
        # rows much faster than a list.
        is_range = last - first + 1 == len(rising)
        rows = self._array[first : last + 1] if is_range else self._array[rising]
        return np.asarray(rows)[np.argsort(order)].astype(dtype, copy=False)


class StoredArraysAdapter(keras_data.ArrayDataAdapter):
    """Keras's array adapter, with row-by-row reading of the arrays in files.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Keras shuffles and batches row numbers in place of an array in a file. The
        # keys are the `id`s of the arrays of numbers, by which readers are found again.
        self._stored_by_stand_in: dict[int, StoredRows] = {}
        shuffle = arguments.get("shuffle", False)
        self._has_class_weight = arguments.get("class_weight") is not None

        def stand_in(leaf: Any) -> Any:
            """Return the row numbers of an array in a file, and register its reader.

            Other leaves are returned unchanged.
            """
            if not _is_read_by_rows(leaf, shuffle):
                return leaf
            numbers = np.arange(len(leaf), dtype="int64")
            self._stored_by_stand_in[id(numbers)] = StoredRows(leaf)
            return numbers

        given = {name: arguments.get(name) for name in _PARTS}
        for name, part in given.items():
            # With class weights Keras reads all values of `y` at once, so `y` is not
            # replaced by row numbers.
            if name != "y" or not self._has_class_weight:
                given[name] = keras.tree.map_structure(stand_in, part)
        super().__init__(
            given["x"],
            given["y"],
            sample_weight=given["sample_weight"],
            batch_size=arguments.get("batch_size"),
            steps=arguments.get("steps_per_epoch"),
            shuffle=shuffle,
            class_weight=arguments.get("class_weight"),
        )

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Create a dataset of batches, whose last stage reads rows from the files."""
        inputs = keras.tree.lists_to_tuples(keras_data.inputs_of(self))
        stored = keras.tree.map_structure(
            lambda leaf: self._stored_by_stand_in.get(id(leaf)), inputs
        )

        def read(leaf: Any, rows: StoredRows | None) -> Any:
            """Return the rows with the numbers in `leaf`; without a reader, `leaf`."""
            return leaf if rows is None else rows.gather(leaf)

        @no_autograph
        def read_stored_rows(*batch: Any) -> Any:
            """Return a batch with the rows of the files in place of row numbers."""
            batch = batch if type(stored) is tuple else batch[0]
            return keras.tree.map_structure(read, batch, stored)

        return super().get_tf_dataset().map(read_stored_rows)


def has_stored_arrays(arguments: dict[str, Any]) -> bool:
    """Return whether any array for a loop should be read from its file row by row.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """
    given = [arguments.get(name) for name in _PARTS]
    read = [given[0], given[2]] if arguments.get("class_weight") is not None else given
    shuffle = arguments.get("shuffle", False)
    is_any = any(_is_read_by_rows(leaf, shuffle) for leaf in keras.tree.flatten(read))
    return is_any and keras_data.can_convert_arrays(tuple(given))


def _is_read_by_rows(leaf: Any, shuffle: bool | str) -> bool:
    """Return whether an array should be read from its file row by row.

    `shuffle` is the argument of `fit`: a bool or `"batch"`.

    A chunked or compressed HDF5 dataset that is shuffled should not: each row would
    cost the read of a chunk. Keras copies the dataset into memory.
    """
    if not isinstance(leaf, (np.memmap, h5py.Dataset)):
        return False
    if not leaf.ndim or leaf.dtype.kind not in _NUMBER_KINDS:
        return False
    is_contiguous = getattr(leaf, "chunks", None) is None
    return is_contiguous or shuffle is False or shuffle == "batch"
