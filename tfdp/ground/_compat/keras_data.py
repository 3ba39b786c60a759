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
# The spec of some batches of arrays, of any number of rows.
spec_of_batches = data_adapter_utils.get_tensor_spec
can_convert_arrays = array_data_adapter.can_convert_arrays


def inputs_of(adapter: Any) -> Any:
    """The nest of arrays that Keras's adapter holds: `x`, or a tuple with `y`, too."""
    return adapter._inputs


def distributed_dataset(epoch_iterator: Any) -> Any:
    """The distributed dataset behind one of Keras's epoch iterators."""
    return epoch_iterator._distributed_dataset


def set_distributed_dataset(epoch_iterator: Any, dataset: Any) -> None:
    """Set the distributed dataset that an epoch iterator of Keras reads."""
    epoch_iterator._distributed_dataset = dataset


def dataset_maker(epoch_iterator: Any) -> Callable:
    """The function that an epoch iterator of Keras asks for its dataset."""
    return epoch_iterator._get_iterator


def set_dataset_of_epoch(epoch_iterator: Any, make: Callable) -> None:
    """Set the function that an epoch iterator of Keras asks for its dataset."""
    epoch_iterator._get_iterator = make


def epoch_progress(epoch_iterator: Any) -> dict[str, Any]:
    """Counters of an epoch iterator of Keras, between two epochs."""
    return {
        "steps_seen": epoch_iterator._steps_seen,
        "num_batches": epoch_iterator._num_batches,
    }


def set_epoch_progress(
    epoch_iterator: Any, progress: dict[str, Any], current: Any
) -> None:
    """Set what `epoch_progress` returned, and the iterator that an epoch goes on with.

    Keras makes one for each epoch, but goes on with one where `steps_per_epoch` is
    given.
    """
    epoch_iterator._steps_seen = progress["steps_seen"]
    if epoch_iterator._num_batches is None:
        epoch_iterator._num_batches = progress["num_batches"]
    epoch_iterator._current_iterator = current


def holds_arrays(adapter: Any) -> bool:
    """Whether Keras's adapter holds arrays, of which it knows the length."""
    return hasattr(adapter, "_inputs")


def shuffles_arrays(adapter: Any) -> bool:
    """Whether Keras's adapter shuffles arrays that it holds."""
    return bool(getattr(adapter, "_shuffle", False)) and holds_arrays(adapter)


def source_of(adapter: Any) -> Any:
    """Source of a data adapter of Keras: arrays, a dataset, or the user's object."""
    own = ("user_data", "_inputs", "_dataset")
    for name in (*own, "py_dataset", "_dataloader", "generator"):
        found = getattr(adapter, name, None)
        if found is not None:
            return found
    return adapter


def first_batch_of(adapter: Any) -> Any:
    """The first batch of a generator or a `PyDataset`, which Keras reads for its spec.

    Returns:
        The batch, or `None` of other data.
    """
    batches = getattr(adapter, "_first_batches", None) or [None]
    return getattr(adapter, "first_batch", batches[0])


def adapter_of_py_dataset(watch: Callable, **arguments: Any) -> Any:
    """Keras's adapter of a `PyDataset`, which keeps the first batch that it reads.

    Args:
        watch: Function of the iterator of a pass, which returns another one.
        **arguments: Those of the adapter.
    """
    adapter: Any = data_adapters.get_data_adapter(**arguments)
    iterate, standardize = adapter._get_iterator, adapter._standardize_batch
    adapter.first_batch = None

    def standardize_and_keep(batch: Any) -> Any:
        batch = standardize(batch)
        if adapter.first_batch is None:
            adapter.first_batch = batch
        return batch

    adapter._get_iterator = lambda: watch(iterate())
    adapter._standardize_batch = standardize_and_keep
    return adapter


class RowsOfPyDatasetAdapter(py_dataset_adapter.PyDatasetAdapter):
    """Keras's adapter of a `PyDataset`, for one whose items are `{"rows", "total"}`.

    Keras standardizes the rows of an item as it does a batch, and adds class weights.
    """

    def _standardize_batch(self, item: dict[str, Any]) -> dict[str, Any]:
        rows = super()._standardize_batch(item["rows"])
        return {"rows": rows, "total": item["total"]}
