"""Data of Keras's loops of which each worker reads its own rows only.

Keras makes a data adapter of what `fit`, `evaluate` and `predict` are given. Of some
kinds of data tfdp makes the adapter, which reads the rows of this worker's replicas:

    py_dataset_rows   a `PyDataset` with the methods `rows` and `num_rows`
    stored_rows       memory maps and HDF5 datasets
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp import _compat
from tfdp.coordination.differences import describe_difference
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
    if not gives_rows(source):
        return arguments
    if strategy.extended.balance is not None:
        tell_of_obstacle(strategy, OF_BALANCE)
        return arguments
    if arguments.get("y") is not None or arguments.get("sample_weight") is not None:
        return arguments  # of which Keras raises
    return arguments | {"x": _rows_of_py_dataset(strategy, source, arguments)}


def _rows_of_py_dataset(strategy: Any, source: Any, arguments: dict[str, Any]) -> Any:
    ranks = _local_ranks(strategy)
    dataset = RowsOfBatches(source, ranks, strategy.num_replicas_in_sync)

    def distribute(make: Callable[[], tf.data.Dataset]) -> Any:
        def describe() -> tuple:
            told = describe_batches(dataset)
            found = make()
            return found, told | {
                "batch": describe_spec(found.element_spec["rows"])
            }

        return _distributed(strategy, "PyDatasets", describe)

    return RowsAdapter(
        dataset,
        distribute,
        arguments.get("class_weight"),
        shuffle=bool(arguments.get("shuffle")),
    )


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
            raise ValueError(f"{fact['problem']} on worker {rank}")
    difference = describe_difference({r: fact["told"] for r, fact in enumerate(facts)})
    if difference:
        worker_group.leave()
        raise ValueError(
            f"Workers have different {kind}. Each reads its own rows of every batch, so "
            f"that all need the same batches. Received: {difference}"
        )
    return found


def _local_ranks(strategy: Any) -> list[int]:
    first = strategy.extended.first_rank
    return list(range(first, first + strategy.extended.num_local))
