"""Data of Keras's loops of which each worker reads its own rows only.

Keras makes a data adapter of what `fit`, `evaluate` and `predict` are given. Of some
kinds of data tfdp makes the adapter, which reads the rows of this worker's replicas:

    PyDataset    with the methods `num_rows(index)`, and `rows(index, start, stop)` for
                 the rows from `start` to `stop` of batch `index`
    DataLoader   of torch, see `loader_rows`
    arrays       in files, memory maps and HDF5 datasets, which Keras copies into
                 memory: its adapter is given the numbers of the rows in their place and
                 shuffles and batches these, of which each worker takes its own
                 (`early_rows`) and reads the rows
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.checks import require_equal
from tfdp.ground import _compat, user_code
from tfdp.ground.base import loops
from tfdp.ground.text import pluralize
from tfdp.training.data.batch_labels import LabelRecord
from tfdp.training.data.early_rows import divide_rows
from tfdp.training.data.element_specs import describe_spec
from tfdp.training.data.per_replica_dataset import ReadOptions, distribute_divided
from tfdp.training.data.rows import rows_to_read
from tfdp.training.data.stages import no_autograph

# So many batches have their rows compared between workers before the first step.
_COMPARED_BATCHES = 10_000
_PARTS = ("x", "y", "sample_weight")
_NUMBERS = "biuf"  # kinds of dtype: booleans, integers, floats


def record_of_loop(*, restarts: bool) -> LabelRecord:
    """Return a record of labels, that of the running `fit` if it is for training."""
    record = LabelRecord(restarts=restarts)
    if (loop := loops.awaiting_training_data()) is not None:
        loop.label_record = record
    return record


def distribute_own(strategy: Any, kind: str, describe: Callable[[], tuple]) -> Any:
    """Distribute a dataset of this worker's rows.

    Args:
        strategy: A tfdp strategy of several workers.
        kind: String, the kind of data, in the plural.
        describe: Function without arguments, which returns a `tf.data.Dataset` of
            dicts of `rows` and `total`, and a description, alike on all workers.

    Raises:
        ValueError: On all workers, if it raises one on any, or if descriptions differ.
    """
    items = _agreed(strategy, kind, describe)
    items, is_ahead = _compat.without_automatic_prefetch(items)
    pairs = items.map(lambda item: (item["rows"], item["total"][0]))
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    divided = divide_rows(pairs, ranks, num_replicas)
    if is_ahead:  # as much as on one device
        divided = divided.prefetch(1)
    # All know how many batches there are, or that there is no end.
    return distribute_divided(strategy, divided, None, ReadOptions(asks_workers=False))


def _agreed(strategy: Any, kind: str, describe: Callable[[], tuple]) -> Any:
    worker_group = strategy.extended.worker_group
    found = None
    try:
        found, told = describe()
        own = {"told": told}
    except ValueError as error:
        own = {"problem": str(error)}
    facts = worker_group.all_gather(f"the batches of {kind}", own)
    for rank, fact in enumerate(facts):
        if "problem" in fact:
            problem = fact["problem"]
            raise worker_group.error(f"Worker {rank} cannot read its rows: {problem}")
    problem = (
        f"Workers have different {kind}. Each reads its own rows of every batch, so "
        "that all need the same batches."
    )
    require_equal(worker_group, problem, [fact["told"] for fact in facts])
    return found


def item_of(rows: Any, total: int) -> dict[str, Any]:
    """This worker's rows of a batch, and the number of all."""
    return {"rows": rows, "total": np.array([total], "int64")}


# A `PyDataset`.


class RowsOfBatches(keras.utils.PyDataset):
    """`PyDataset` of the rows of one worker.

    Args:
        source: `keras.utils.PyDataset` of the user, with `rows` and `num_rows`.
        ranks: Sequence of ints, consecutive, the replicas of this worker.
        num_replicas: Int, on all workers.
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
        """Int, or `None` if there is no end."""
        return self.source.num_batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return this worker's rows of a batch, and the number of all.

        Of a batch in which it has none it has one all the same, which tells shapes.
        No operation of TensorFlow: Keras may call it in a forked process.
        """
        total = _num_rows_of(self.source, index)
        own = rows_to_read(total, self.ranks, self.num_replicas)
        rows = self.source.rows(index, own.start, own.stop)
        _check_rows(self.source, index, own.start, own.stop, rows)
        return item_of(rows, total)

    def on_epoch_begin(self) -> None:
        """Pass it on."""
        self.source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Pass it on."""
        self.source.on_epoch_end()


def rows_of_py_dataset(strategy: Any, source: Any, arguments: dict[str, Any]) -> Any:
    """Return an adapter for a `PyDataset` that gives rows."""
    ranks = strategy.extended.local_ranks
    dataset = RowsOfBatches(source, ranks, strategy.num_replicas_in_sync)
    adapter = _compat.RowsOfPyDatasetAdapter(
        dataset,
        class_weight=arguments.get("class_weight"),
        shuffle=bool(arguments.get("shuffle")),
    )
    # Calls `rows` of the first two batches, by which Keras finds the spec.
    make = adapter.get_tf_dataset

    def describe() -> tuple:
        told = describe_batches(dataset)
        found = make()
        return found, told | {"batch": describe_spec(found.element_spec["rows"])}

    adapter.get_tf_dataset = lambda: distribute_own(strategy, "PyDatasets", describe)
    adapter.user_data = source
    return adapter


def gives_rows(source: Any) -> bool:
    """Return whether a `PyDataset` of the user can be asked for rows.

    A class may have something else of the name `rows`: it takes no three positions.
    """
    if not isinstance(source, keras.utils.PyDataset):
        return False
    if not _takes(source, "rows", 0, 0, 1):
        return False
    if _takes(source, "num_rows", 0):
        return True
    user_code.warn(
        f"Each worker reads whole batches of {type(source).__name__}, and not only its "
        "own rows: it has `rows(index, start, stop)` and no `num_rows(index)`, which "
        "returns the number of rows of a batch."
    )
    return False


def describe_batches(dataset: RowsOfBatches) -> dict[str, Any]:
    """Describe number and rows of batches, to be compared between workers.

    Raises:
        ValueError: If the number of rows of a batch is no positive integer.
    """
    num_batches = dataset.num_batches
    known = 2 if num_batches is None else min(num_batches, _COMPARED_BATCHES)
    rows = [_num_rows_of(dataset.source, index) for index in range(known)]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return {
        "number of batches": num_batches,
        "number of rows": sum(rows),
        "digest of the rows of each batch": digest,
    }


def _num_rows_of(source: Any, index: int) -> int:
    """Return the number of rows of a batch, as the user's class tells it."""
    found = source.num_rows(index)
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
        raise ValueError(
            f"`num_rows` of {type(source).__name__} must return the number of rows of "
            f"a batch, an integer of 1 or more. Received: num_rows({index})={found!r}"
        )
    return int(found)


def _takes(source: Any, name: str, *positions: int) -> bool:
    """Return whether an object has a method that takes so many positions."""
    try:
        inspect.signature(getattr(source, name)).bind(*positions)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _check_rows(source: Any, index: int, start: int, stop: int, rows: Any) -> None:
    """Raise if the user's class returned another number of rows than was asked for."""
    parts = [part for part in keras.tree.flatten(rows) if getattr(part, "shape", None)]
    counts = [int(part.shape[0]) for part in parts]
    if not counts or any(count != stop - start for count in counts):
        raise ValueError(
            f"`rows({index}, {start}, {stop})` of {type(source).__name__} must return "
            f"{pluralize(stop - start, 'row')} in each part of the batch. Received: "
            f"parts with these numbers of rows: {counts}"
        )


# Arrays in files.


class StoredRows:
    """An array in a file.

    Args:
        array: `np.memmap` or `h5py.Dataset`.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        is_float = array.dtype.kind == "f"
        self._dtype = tf.as_dtype(keras.config.floatx() if is_float else array.dtype)

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Read rows, in a graph.

        Args:
            numbers: Tensor of shape `[num]`, int64, each number once.
        """
        rows = tf.numpy_function(self.read, [numbers], self._dtype, stateful=False)
        return tf.ensure_shape(rows, [numbers.shape[0], *self._array.shape[1:]])

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Read rows.

        Args:
            numbers: Array of shape `[num]`, int64, each number once.
        """
        dtype = self._dtype.as_numpy_dtype
        if len(numbers) == 0:
            return np.zeros([0, *self._array.shape[1:]], dtype)
        order = np.argsort(numbers)
        rising = numbers[order]
        first, last = int(rising[0]), int(rising[-1])
        # HDF5 reads rows in rising order, and a range much faster.
        is_range = last - first + 1 == len(rising)
        rows = self._array[first : last + 1] if is_range else self._array[rising]
        return np.asarray(rows)[np.argsort(order)].astype(dtype, copy=False)


class StoredArraysAdapter(_compat.ArrayDataAdapter):
    """Keras's adapter of arrays, some of which stand in files.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        # By the number of a stand-in, which Keras holds as it is.
        self._stored: dict[int, StoredRows] = {}
        shuffle = arguments.get("shuffle", False)
        self._of_classes = arguments.get("class_weight") is not None

        def stand_in(leaf: Any) -> Any:
            if not _is_read_by_rows(leaf, shuffle):
                return leaf
            numbers = np.arange(len(leaf), dtype="int64")
            self._stored[id(numbers)] = StoredRows(leaf)
            return numbers

        given = {name: arguments.get(name) for name in _PARTS}
        for name, part in given.items():
            if name != "y" or not self._of_classes:  # Keras reads them for the weights
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
        """Make a dataset of batches; the rows are read by its last stage."""
        inputs = keras.tree.lists_to_tuples(_compat.inputs_of(self))
        stored = keras.tree.map_structure(
            lambda leaf: self._stored.get(id(leaf)), inputs
        )

        def read(leaf: Any, rows: StoredRows | None) -> Any:
            return leaf if rows is None else rows.gather(leaf)

        @no_autograph
        def read_stored_rows(*batch: Any) -> Any:
            batch = batch if type(stored) is tuple else batch[0]
            return keras.tree.map_structure(read, batch, stored)

        return super().get_tf_dataset().map(read_stored_rows)


def has_stored_arrays(arguments: dict[str, Any]) -> bool:
    """Return whether arrays for a loop are better read row by row.

    Args:
        arguments: Dict, keyword arguments of Keras's epoch iterator.
    """
    given = [arguments.get(name) for name in _PARTS]
    read = [given[0], given[2]] if arguments.get("class_weight") is not None else given
    shuffle = arguments.get("shuffle", False)
    is_any = any(_is_read_by_rows(leaf, shuffle) for leaf in keras.tree.flatten(read))
    return is_any and _compat.can_convert_arrays(tuple(given))


def _is_read_by_rows(leaf: Any, shuffle: bool | str) -> bool:
    """Return whether rows of an array are read from its file.

    Rows of a chunked or compressed HDF5 dataset in random order cost a chunk each:
    that one goes into memory, as Keras does it.
    """
    if not isinstance(leaf, (np.memmap, h5py.Dataset)):
        return False
    if not leaf.ndim or leaf.dtype.kind not in _NUMBERS:
        return False
    is_contiguous = getattr(leaf, "chunks", None) is None
    return is_contiguous or shuffle is False or shuffle == "batch"
