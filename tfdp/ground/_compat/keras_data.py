"""Data adapters and epoch iterators of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    data_adapter_utils,
    py_dataset_adapter,
    torch_data_loader_adapter,
)

ArrayDataAdapter = array_data_adapter.ArrayDataAdapter
TorchDataLoaderAdapter = torch_data_loader_adapter.TorchDataLoaderAdapter
is_torch_dataloader = data_adapters.is_torch_dataloader
# Keras's private function for the spec of a batch of arrays. The number of rows is
# unknown in the spec, since the last batch may be smaller.
spec_of_batches = data_adapter_utils.get_tensor_spec
can_convert_arrays = array_data_adapter.can_convert_arrays


def inputs_of(adapter: Any) -> Any:
    """Return the arrays in Keras's adapter of arrays: `x`, or a tuple `(x, y, ...)`."""
    return adapter._inputs


def distributed_dataset(epoch_iterator: Any) -> Any:
    """Return the distributed dataset that an epoch iterator of Keras reads."""
    return epoch_iterator._distributed_dataset


def set_distributed_dataset(epoch_iterator: Any, dataset: Any) -> None:
    """Set the distributed dataset that an epoch iterator of Keras reads."""
    epoch_iterator._distributed_dataset = dataset


def dataset_maker(epoch_iterator: Any) -> Callable:
    """Return the function that Keras's epoch iterator calls to get its dataset."""
    return epoch_iterator._get_iterator


def set_dataset_of_epoch(epoch_iterator: Any, make: Callable) -> None:
    """Set the function `make` that Keras's epoch iterator calls to get its dataset."""
    epoch_iterator._get_iterator = make


def is_read_immediately(epoch_iterator: Any) -> bool:
    """Return whether Keras reads at once from the data iterator that it now creates.

    Call it only while Keras creates the iterator. It is false for the iterator that
    Keras creates after the last batch of data of known length, and may never read.
    """
    return epoch_iterator._current_iterator is None


def epoch_progress(epoch_iterator: Any) -> dict[str, Any]:
    """Return the counters of an epoch iterator of Keras, to save it between two epochs.

    Returns:
        Dict of `"steps_seen"`, the steps that Keras's current iterator has made, and
        `"num_batches"`, those of one pass over the data, or `None` if unknown.
    """
    return {
        "steps_seen": epoch_iterator._steps_seen,
        "num_batches": epoch_iterator._num_batches,
    }


def set_epoch_progress(
    epoch_iterator: Any, progress: dict[str, Any], current: Any
) -> None:
    """Restore a result of `epoch_progress`, and the iterator of the next epoch.

    Keras creates an iterator for each epoch, unless `steps_per_epoch` is set: then the
    next epoch continues with the current iterator.

    Args:
        epoch_iterator: Epoch iterator of Keras.
        progress: Dict, the result of `epoch_progress`.
        current: Iterator of the next epoch, or `None` if Keras creates it.
    """
    epoch_iterator._steps_seen = progress["steps_seen"]
    if epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = progress["num_batches"]
    epoch_iterator._current_iterator = current


def holds_arrays(adapter: Any) -> bool:
    """Return whether Keras's adapter holds arrays, with a known length."""
    return hasattr(adapter, "_inputs")


def shuffles_arrays(adapter: Any) -> bool:
    """Return whether Keras's adapter shuffles the arrays that it holds."""
    return bool(getattr(adapter, "_shuffle", False)) and holds_arrays(adapter)


def shuffles(adapter: Any) -> bool:
    """Return whether Keras's adapter shuffles arrays or the batches of a `PyDataset`.

    Adapters of arrays have `_shuffle`, that of a `PyDataset` has `shuffle`; others have
    neither. Checked on Keras 3.12 to 3.15.
    """
    return bool(getattr(adapter, "_shuffle", getattr(adapter, "shuffle", False)))


def shuffles_in_batches(adapter: Any) -> bool:
    """Return whether Keras's adapter shuffles arrays with `shuffle="batch"`."""
    return getattr(adapter, "_shuffle", False) == "batch"


def has_py_dataset(adapter: Any) -> bool:
    """Return whether Keras's adapter reads a `PyDataset`."""
    return hasattr(adapter, "py_dataset")


def source_of(adapter: Any) -> Any:
    """Return the source of Keras's data adapter: arrays, a dataset, or other data.

    For an adapter of another kind, return the adapter itself.
    """
    attributes = ("user_data", "_inputs", "_dataset")
    for name in (*attributes, "py_dataset", "_dataloader", "generator"):
        source = getattr(adapter, name, None)
        if source is not None:
            return source
    return adapter


def first_batch_of(adapter: Any) -> Any:
    """Return the first batch that Keras's adapter read from a generator or `PyDataset`.

    Returns:
        The batch; `None` for other data, and if a `PyDataset` was not read yet.
    """
    batches = getattr(adapter, "_first_batches", None) or [None]
    return getattr(adapter, "first_batch", batches[0])


def adapter_of_py_dataset(watch: Callable, **arguments: Any) -> Any:
    """Return Keras's adapter of a `PyDataset`, extended to keep the first batch.

    `first_batch_of` returns that batch.

    Args:
        watch: Callable that takes the iterator of a pass over the data, and returns the
            one that replaces it.
        **arguments: Arguments of `get_data_adapter`.
    """
    adapter: Any = data_adapters.get_data_adapter(**arguments)
    iterate, standardize = adapter._get_iterator, adapter._standardize_batch
    adapter.first_batch = None

    def standardize_and_keep(batch: Any) -> Any:
        """Return a batch as Keras standardizes it; keep the first one."""
        batch = standardize(batch)
        if adapter.first_batch is None:
            adapter.first_batch = batch
        return batch

    adapter._get_iterator = lambda: watch(iterate())
    adapter._standardize_batch = standardize_and_keep
    return adapter


class RowsOfPyDatasetAdapter(py_dataset_adapter.PyDatasetAdapter):
    """Keras's adapter of a `PyDataset` that reads only this worker's rows of a batch.

    Each item of the dataset is a dict: `"rows"` are this worker's rows, which Keras
    standardizes like a batch, and `"total"` is the number of rows of the global batch.
    """

    def _standardize_batch(self, item: dict[str, Any]) -> dict[str, Any]:
        """Standardize the `"rows"` of an item, and return it with its `"total"`."""
        rows = super()._standardize_batch(item["rows"])
        return {"rows": rows, "total": item["total"]}
