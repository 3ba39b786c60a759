"""Data of Keras's loops of which each worker reads its own rows only.

Keras makes a data adapter of what `fit`, `evaluate` and `predict` are given. Of some
kinds of data tfdp makes the adapter, which reads the rows of this worker's replicas:

    py_dataset_rows   a `PyDataset` with the methods `rows` and `num_rows`
    stored_rows       memory maps and HDF5 datasets
    loader_rows       a torch `DataLoader`
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.checks import describe_difference
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import _compat, user_code
from tfdp.ground.base import loops
from tfdp.training.data import loader_rows
from tfdp.training.data.batch_labels import LabelRecord
from tfdp.training.data.determinism import common_seed
from tfdp.training.data.distribute import REBALANCE_REASON, warn_not_split_early
from tfdp.training.data.early_rows import divide_rows
from tfdp.training.data.element_specs import describe_spec
from tfdp.training.data.per_replica_dataset import ReadOptions, distribute_divided
from tfdp.training.data.py_dataset_rows import (
    RowsAdapter,
    RowsOfBatches,
    describe_batches,
    gives_rows,
)
from tfdp.training.data.stored_rows import StoredArraysAdapter, has_stored_arrays

_OF_RANDOM_ITEMS = (
    "its dataset draws random numbers, which each worker would draw for its rows only; "
    "seed them by the index of the item in a generator of their own, or augment in "
    "layers of the model"
)


def with_own_rows(strategy: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replace the data of an epoch iterator by an adapter that reads own rows only.

    Args:
        strategy: A tfdp strategy of several workers.
        arguments: Dict, keyword arguments of Keras's epoch iterator.

    Returns:
        The same dict, or one with an adapter as `x`.
    """
    source = arguments.get("x")
    if has_stored_arrays(arguments):
        return arguments | {"x": StoredArraysAdapter(arguments)}
    if _compat.is_torch_dataloader(source):
        return arguments | {"x": _rows_of_loader(strategy, source)}
    if isinstance(source, types.GeneratorType):
        return arguments | {"x": _record_of_loop(restarts=False).watch(source)}
    if not isinstance(source, keras.utils.PyDataset):
        return arguments
    if arguments.get("y") is not None or arguments.get("sample_weight") is not None:
        return arguments  # of which Keras raises
    has_rows = gives_rows(source)
    if has_rows and strategy.extended.balance is not None:
        warn_not_split_early(strategy, REBALANCE_REASON)
    elif has_rows:
        return arguments | {"x": _rows_of_py_dataset(strategy, source, arguments)}
    record = _record_of_loop(restarts=arguments.get("steps_per_epoch") is None)
    names = ("x", "class_weight", "shuffle")
    given = {name: arguments[name] for name in names if name in arguments}
    adapter = _compat.adapter_of_py_dataset(record.watch, **given)
    return arguments | {"x": adapter}


def _record_of_loop(*, restarts: bool) -> LabelRecord:
    """Return a record of labels, that of the running `fit` if it is for training."""
    record = LabelRecord(restarts=restarts)
    if (loop := loops.awaiting_training_data()) is not None:
        loop.label_record = record
    return record


def _rows_of_py_dataset(strategy: Any, source: Any, arguments: dict[str, Any]) -> Any:
    ranks = strategy.extended.local_ranks
    dataset = RowsOfBatches(source, ranks, strategy.num_replicas_in_sync)

    def distribute(make: Callable[[], tf.data.Dataset]) -> Any:
        def describe() -> tuple:
            told = describe_batches(dataset)
            found = make()
            return found, told | {"batch": describe_spec(found.element_spec["rows"])}

        return _distributed(strategy, "PyDatasets", describe)

    return RowsAdapter(
        dataset,
        distribute,
        arguments.get("class_weight"),
        shuffle=bool(arguments.get("shuffle")),
    )


def _rows_of_loader(strategy: Any, loader: Any) -> Any:
    """Return an adapter for a `DataLoader`, or the loader where all read all rows."""
    worker_group = strategy.extended.worker_group
    _agree_on_order(worker_group, loader)
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    obstacle = loader_rows.why_not_split_loader(loader)
    if not obstacle and strategy.extended.balance is not None:
        obstacle = REBALANCE_REASON
    items: list = []
    if not worker_group.any("a DataLoader", bool(obstacle)):
        items, is_random = loader_rows.first_items(loader, ranks, num_replicas)
        obstacle = _OF_RANDOM_ITEMS if is_random else ""
        if not worker_group.any("random numbers of a DataLoader", is_random):
            return _adapter_of_loader(strategy, loader, items)
    warn_not_split_early(strategy, obstacle)
    return loader


def _adapter_of_loader(strategy: Any, loader: Any, items: list) -> Any:
    ranks, num_replicas = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    told = {
        "number of batches": len(loader),
        "rows": len(loader.dataset),
        "batch_size": loader.batch_size,
        "batch": describe_spec(_compat.spec_of_batches(items)["rows"]),
    }
    return loader_rows.LoaderRowsAdapter(
        loader,
        loader_rows.loader_of_rows(loader, loader.dataset, ranks, num_replicas),
        lambda make: _distributed(strategy, "DataLoaders", lambda: (make(), told)),
        _compat.spec_of_batches(items),
    )


def _agree_on_order(worker_group: WorkerGroup, loader: Any) -> None:
    """Have torch shuffle alike on all workers, which nobody has seeded before."""
    if worker_group.any("shards of a DataLoader", loader_rows.is_sharded(loader)):
        user_code.warn(
            "This DataLoader is divided twice, so that some of its rows are never "
            "read: each worker has a shard of its own, and takes its rows of each "
            "batch of that. Leave `DistributedSampler` out, and batch by the global "
            "batch size on every worker."
        )
    states = json.dumps(loader_rows.generator_states(loader))
    same, _ = worker_group.all_equal("torch's random state", states)
    if not same:
        loader_rows.seed_generators(loader, common_seed(worker_group))


def _distributed(strategy: Any, kind: str, describe: Callable[[], tuple]) -> Any:
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
    facts = worker_group.all_gather_values(f"the batches of {kind}", own)
    for rank, fact in enumerate(facts):
        if "problem" in fact:
            worker_group.leave()
            raise ValueError(f"Worker {rank} cannot read its rows: {fact['problem']}")
    difference = describe_difference({r: fact["told"] for r, fact in enumerate(facts)})
    if difference:
        worker_group.leave()
        raise ValueError(
            f"Workers have different {kind}. Each reads its own rows of every batch, "
            f"so that all need the same batches. Received: {difference}"
        )
    return found
