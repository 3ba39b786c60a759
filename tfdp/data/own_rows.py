"""Data of Keras's loops of which each worker reads its own rows only.

Keras makes a data adapter of what `fit`, `evaluate` and `predict` are given. Of some
kinds of data tfdp makes the adapter, which reads the rows of this worker's replicas:

    py_dataset_rows   a `PyDataset` with the methods `rows` and `num_rows`
    stored_rows       memory maps and HDF5 datasets
    loader_rows       a torch `DataLoader`
"""

from __future__ import annotations

import json
import random
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat, user_code
from tfdp.base import loops
from tfdp.coordination.differences import describe_difference
from tfdp.coordination.worker_group import WorkerGroup
from tfdp.data import loader_rows
from tfdp.data.batch_labels import LabelRecord
from tfdp.data.distribute import OF_BALANCE, distribute_divided, tell_of_obstacle
from tfdp.data.early_rows import divide_rows
from tfdp.data.element_specs import describe_spec
from tfdp.data.per_replica_dataset import ReadOptions
from tfdp.data.py_dataset_rows import (
    RowsAdapter,
    RowsOfBatches,
    describe_batches,
    gives_rows,
)
from tfdp.data.stored_rows import StoredArraysAdapter, has_stored_arrays

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
        tell_of_obstacle(strategy, OF_BALANCE)
    elif has_rows:
        return arguments | {"x": _rows_of_py_dataset(strategy, source, arguments)}
    record = _record_of_loop(restarts=arguments.get("steps_per_epoch") is None)
    names = ("x", "class_weight", "shuffle")
    given = {name: arguments[name] for name in names if name in arguments}
    adapter = _compat.adapter_of_py_dataset(record.watch, **given)
    return arguments | {"x": adapter}


def _record_of_loop(*, restarts: bool) -> LabelRecord:
    """Return a record of labels, that of the running `fit` if it is for training."""
    record, loop = LabelRecord(restarts=restarts), loops.current()
    if loop is not None and loop.awaits_training_data:
        loop.label_record = record
    return record


def _rows_of_py_dataset(strategy: Any, source: Any, arguments: dict[str, Any]) -> Any:
    ranks = _local_ranks(strategy)
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
    ranks, num_replicas = _local_ranks(strategy), strategy.num_replicas_in_sync
    obstacle = loader_rows.obstacle_of_loader(loader)
    if not obstacle and strategy.extended.balance is not None:
        obstacle = OF_BALANCE
    items: list = []
    if not worker_group.any("a DataLoader", bool(obstacle)):
        items, is_random = loader_rows.first_items(loader, ranks, num_replicas)
        obstacle = _OF_RANDOM_ITEMS if is_random else ""
        if not worker_group.any("random numbers of a DataLoader", is_random):
            return _adapter_of_loader(strategy, loader, items)
    tell_of_obstacle(strategy, obstacle)
    return loader


def _adapter_of_loader(strategy: Any, loader: Any, items: list) -> Any:
    ranks, num_replicas = _local_ranks(strategy), strategy.num_replicas_in_sync
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
        seed = str(random.SystemRandom().getrandbits(30))
        first = worker_group.all_gather("a seed for torch", seed)[0]
        loader_rows.seed_generators(loader, int(first))


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
    divided = divide_rows(pairs, _local_ranks(strategy), strategy.num_replicas_in_sync)
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
    texts = worker_group.all_gather(f"the batches of {kind}", json.dumps(own))
    facts = [json.loads(text) for text in texts]
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


def _local_ranks(strategy: Any) -> list[int]:
    first = strategy.extended.first_rank
    return list(range(first, first + strategy.extended.num_local))
