"""Loading of a worker's rows only, for torch's `DataLoader`.

On every worker the sampler of a loader yields the same row numbers for each global
batch. Each worker loads the rows of its replicas.
"""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import user_code
from tfdp.ground._compat import keras_data
from tfdp.training.data.determinism import broadcast_seed
from tfdp.training.data.distribute import REBALANCE_REASON, warn_not_split_early
from tfdp.training.data.element_specs import describe_spec
from tfdp.training.data.own_rows import (
    distribute_local_rows,
    item_of,
)
from tfdp.training.data.rows import rows_to_read

_SAMPLERS = (
    "SequentialSampler",
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
)
# Keras finds the spec of a `DataLoader` from its first two batches. tfdp gives it this
# worker's rows of as many batches.
_BATCHES_FOR_SPEC = 2
_RANDOM_ITEMS_REASON = (
    "its dataset draws random numbers, which each worker would draw for its own rows "
    "only; draw them from a separate generator, seeded with the index of the item, or "
    "augment in layers of the model"
)


class LocalRowsSampler:
    """Batch sampler that yields, for each batch, the indices of this worker's rows.

    Args:
        batches: `torch.utils.data.BatchSampler` of global batches.
        ranks: Sequence of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.

    Attributes:
        totals: `collections.deque` of ints, the number of rows of each global batch of
            the latest pass. The reader of a batch removes the number of its rows.
    """

    def __init__(self, batches: Any, ranks: Sequence[int], num_replicas: int) -> None:
        self._batches = batches
        self._ranks = list(ranks)
        self._num_replicas = num_replicas
        self.totals: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        """Begin a pass: iterate over lists of row numbers, one list for each batch."""
        self.totals = collections.deque()
        return self._numbers(self.totals)

    def _numbers(self, totals: collections.deque[int]) -> Iterator[list]:
        """Yield for each batch the list of row numbers that this worker reads.

        `totals` receives the number of rows of each global batch.
        """
        for batch in self._batches:
            total = len(batch)
            own = rows_to_read(total, self._ranks, self._num_replicas)
            totals.append(total)
            yield list(batch[own.start : own.stop])


class RandomnessWatch:
    """Dataset that pairs each item with whether reading its batch drew random numbers.

    Args:
        dataset: Map-style dataset of torch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._dataset)

    def __getitems__(self, indices: list) -> list[tuple]:
        """Return pairs of an item and a bool: whether the read drew random numbers."""
        before = _random_states()
        if hasattr(self._dataset, "__getitems__"):
            items = self._dataset.__getitems__(indices)
        else:
            items = [self._dataset[index] for index in indices]
        is_random = _random_states() != before
        return [(item, is_random) for item in items]


def rows_of_loader(strategy: Any, loader: Any) -> Any:
    """Return a Keras data adapter that loads only this worker's rows of a `DataLoader`.

    If a worker cannot load only its own rows, all workers return `loader`, with a
    warning. All workers call it.
    """
    worker_group = strategy.extended.worker_group
    _synchronize_generators(worker_group, loader)
    division = strategy.extended.local_ranks, strategy.num_replicas_in_sync
    obstacle = why_not_split_loader(loader)
    if not obstacle and strategy.extended.balance is not None:
        obstacle = REBALANCE_REASON
    if worker_group.any("a DataLoader", bool(obstacle)):
        warn_not_split_early(strategy, obstacle)
        return loader
    items, is_random, restore = first_items(loader, *division)
    if worker_group.any("random numbers of a DataLoader", is_random):
        # Keras reads the batches again. A worker whose own rows draw nothing restores
        # the states as well, or its next order of samples would be another one.
        restore()
        warn_not_split_early(strategy, _RANDOM_ITEMS_REASON)
        return loader
    spec = keras_data.spec_of_batches(items)
    local_loader = loader_of_rows(loader, loader.dataset, *division)

    def describe() -> tuple:
        """Return a pair: the dataset of this worker's rows, and facts to compare.

        The facts are a dict that must be the same on all workers.
        """
        facts = {
            "number of batches": len(loader),
            "rows": len(loader.dataset),
            "batch_size": loader.batch_size,
            "batch": describe_spec(spec["rows"]),
        }
        make = tf.data.Dataset.from_generator
        return make(lambda: items_of(local_loader), output_signature=spec), facts

    adapter = keras_data.TorchDataLoaderAdapter(loader)
    adapter.get_tf_dataset = lambda: distribute_local_rows(
        strategy, "DataLoaders", describe
    )
    return adapter


def _synchronize_generators(worker_group: WorkerGroup, loader: Any) -> None:
    """Seed torch's generators alike on all workers if their states differ.

    Warn if a `DistributedSampler` divides the data in addition to tfdp.
    """
    sampler = type(getattr(loader, "sampler", None)).__name__
    if worker_group.any("shards of a DataLoader", sampler == "DistributedSampler"):
        user_code.warn(
            "This DataLoader is divided twice, so that some of its rows are never "
            "read: each worker has its own shard, and trains on only a part of each "
            "batch of it. Remove `DistributedSampler`, and batch by the global batch "
            "size on every worker."
        )
    generators = _generators(loader)
    states = [generator.get_state().numpy().tobytes() for generator in generators]
    digests = [hashlib.sha256(state).hexdigest() for state in states]
    if not worker_group.all_equal("torch's random state", digests):
        seed = broadcast_seed(worker_group)
        for generator in generators:
            generator.manual_seed(seed)


def why_not_split_loader(loader: Any) -> str:
    """Describe why each worker must load all rows, with the remedy; else `""`."""
    import torch

    data = torch.utils.data
    if type(loader) is not data.DataLoader:
        return f"{type(loader).__name__} is a subclass of `DataLoader`"
    if isinstance(loader.dataset, data.IterableDataset):
        return "its dataset is iterable; give it one with `__len__` and `__getitem__`"
    sampler = type(loader.sampler)
    if type(loader.batch_sampler) is not data.BatchSampler:
        return "it has its own `batch_sampler`; give it `batch_size` and `shuffle`"
    if sampler not in [getattr(data, name) for name in _SAMPLERS]:
        return f"it has a {sampler.__name__}; give it `batch_size` and `shuffle`"
    if loader.collate_fn is not data.default_collate:
        return (
            "its `collate_fn` may use all rows of a batch; remove it, and do its work "
            "in the dataset"
        )
    if not getattr(loader, "in_order", True):
        return "with `in_order=False` its batches come in any order; remove that"
    return ""


def loader_of_rows(
    loader: Any, dataset: Any, ranks: Sequence[int], num_replicas: int, **changed: Any
) -> Any:
    """Create a `DataLoader` of the rows of one worker.

    Args:
        loader: `torch.utils.data.DataLoader` of global batches.
        dataset: The loader's dataset, or one with the same number of rows.
        ranks: Sequence of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.
        **changed: Settings that differ from those of `loader`.
    """
    import torch

    settings = {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
            *("multiprocessing_context", "generator", "prefetch_factor"),
            "persistent_workers",
        )
    }
    sampler = LocalRowsSampler(loader.batch_sampler, ranks, num_replicas)
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, **(settings | changed)
    )


def items_of(local_loader: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a loader of this worker's rows.

    Args:
        local_loader: `DataLoader` that `loader_of_rows` returned.

    Yields:
        Dict with `rows`, a tuple of arrays, and `total`, an array with the number of
        rows of the global batch.
    """
    batches = iter(local_loader)
    totals = local_loader.batch_sampler.totals
    for batch in batches:
        yield item_of(_arrays_of(batch), totals.popleft())


def first_items(loader: Any, ranks: Sequence[int], num_replicas: int) -> tuple:
    """Read this worker's rows of the first batches, from which Keras finds the spec.

    Args:
        loader: `torch.utils.data.DataLoader` of global batches.
        ranks: Sequence of consecutive ints, the ranks of this worker's replicas.
        num_replicas: Int, number of replicas on all workers.

    Returns:
        Tuple: list of dicts as `items_of` yields them, whether the dataset draws
        random numbers, and a function that restores the states of all generators.
    """
    import torch

    def collate(pairs: list[tuple]) -> tuple:
        """Return a batch of items, and whether reading them drew random numbers.

        `pairs` are from a `RandomnessWatch`: each has an item of the batch, and a bool,
        whether reading the batch drew random numbers.
        """
        items, is_random = zip(*pairs, strict=True)
        return torch.utils.data.default_collate(list(items)), any(is_random)

    generators = _generators(loader)
    before = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    settings = {"collate_fn": collate, "persistent_workers": False}
    dataset = RandomnessWatch(loader.dataset)
    local_loader = loader_of_rows(loader, dataset, ranks, num_replicas, **settings)
    items, draws = [], False
    batches = iter(local_loader)
    for _, (batch, is_random) in zip(range(_BATCHES_FOR_SPEC), batches, strict=False):
        items.append(
            item_of(_arrays_of(batch), local_loader.batch_sampler.totals.popleft())
        )
        draws |= is_random
    # The iterator is deleted at once, because its deletion ends the worker processes of
    # the `DataLoader`.
    del batches

    def restore() -> None:
        """Restore the states that the generators had before the first batch."""
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return items, draws, restore


def _generators(loader: Any) -> list[Any]:
    """Return torch's default generator, and those of a loader and its sampler."""
    import torch

    generators = [torch.default_generator]
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if generator is not None and all(
            generator is not other for other in generators
        ):
            generators.append(generator)
    return generators


def _arrays_of(batch: Any) -> tuple:
    """Convert a batch of torch tensors to a tuple of NumPy arrays, as Keras does."""
    return tuple(
        keras.tree.map_structure(
            lambda part: None if part is None else np.asarray(part.cpu()), batch
        )
    )


def _random_states() -> list:
    """Return a list of the generators' states: Python's, NumPy's and torch's."""
    import torch

    numpy_state: Any = np.random.get_state()
    return [
        random.getstate(),
        [np.asarray(part).tolist() for part in numpy_state],
        torch.get_rng_state().numpy().tobytes(),
    ]
