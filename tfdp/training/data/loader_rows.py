"""Rows of a worker of a torch `DataLoader`.

The sampler gives the numbers of the rows of each global batch, alike on all workers. A
worker loads those of its own, by the loader's own settings: the same dataset, processes
and seeds.
"""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.training.data.rows import rows_to_read

_SAMPLERS = (
    "SequentialSampler",
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
)
# How many batches are read for the spec, as Keras reads them.
_BATCHES_FOR_SPEC = 2


class OwnBatches:
    """Sampler of the numbers of this worker's rows of each batch.

    Args:
        batches: `torch.utils.data.BatchSampler` of global batches.
        ranks: Sequence of ints, consecutive, the replicas of this worker.
        num_replicas: Int, on all workers.

    Attributes:
        totals: `collections.deque` of ints, the rows of each global batch of the last
            pass that has begun. Who takes a batch takes its number.
    """

    def __init__(self, batches: Any, ranks: Sequence[int], num_replicas: int) -> None:
        self._batches = batches
        self._ranks = list(ranks)
        self._num_replicas = num_replicas
        self.totals: collections.deque[int] = collections.deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        self.totals = collections.deque()
        return self._numbers(self.totals)

    def _numbers(self, totals: collections.deque[int]) -> Iterator[list]:
        for batch in self._batches:
            total = len(batch)
            own = rows_to_read(total, self._ranks, self._num_replicas)
            totals.append(total)
            yield list(batch[own.start : own.stop])


class Watched:
    """Dataset that tells of each item whether random numbers were drawn for it.

    Args:
        dataset: Map-style dataset of torch.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list) -> list[tuple]:
        before = _random_states()
        if hasattr(self._dataset, "__getitems__"):
            items = self._dataset.__getitems__(indices)
        else:
            items = [self._dataset[index] for index in indices]
        is_random = _random_states() != before
        return [(item, is_random) for item in items]


class LoaderRowsAdapter(_compat.TorchDataLoaderAdapter):
    """Data adapter of Keras for the rows of one worker.

    Args:
        loader: `torch.utils.data.DataLoader` of the user.
        own: The loader of this worker's rows, see `loader_of_rows`.
        distribute: Function that takes one which makes a `tf.data.Dataset` of dicts
            of this worker's `rows` and the `total`, and returns a distributed dataset.
        spec: Nest of specs, of these dicts.
    """

    def __init__(self, loader: Any, own: Any, distribute: Callable, spec: Any) -> None:
        super().__init__(loader)
        self.user_data = loader
        self._own = own
        self._distribute = distribute
        self._spec = spec

    def get_tf_dataset(self) -> Any:
        """Make a distributed dataset, which Keras takes as it is."""
        return self._distribute(
            lambda: tf.data.Dataset.from_generator(
                lambda: items_of(self._own), output_signature=self._spec
            )
        )


def why_not_split_loader(loader: Any) -> str:
    """Say what makes each worker load all rows, and what to do; empty if nothing."""
    import torch

    data = torch.utils.data
    if type(loader) is not data.DataLoader:
        return f"{type(loader).__name__} is a `DataLoader` of its own kind"
    if isinstance(loader.dataset, data.IterableDataset):
        return "its dataset is iterable; give it one with `__len__` and `__getitem__`"
    sampler = type(loader.sampler)
    if type(loader.batch_sampler) is not data.BatchSampler:
        return "it has a `batch_sampler` of its own; give it `batch_size` and `shuffle`"
    if sampler not in [getattr(data, name) for name in _SAMPLERS]:
        return f"it has a {sampler.__name__}; give it `batch_size` and `shuffle`"
    if loader.collate_fn is not data.default_collate:
        return (
            "its `collate_fn` may look at all rows of a batch; leave it out, and do "
            "what it does in the dataset"
        )
    if not getattr(loader, "in_order", True):
        return "with `in_order=False` its batches come in any order; leave that out"
    return ""


def is_sharded(loader: Any) -> bool:
    """Return whether a `DataLoader` gives each worker a shard of its own."""
    return type(getattr(loader, "sampler", None)).__name__ == "DistributedSampler"


def loader_of_rows(
    loader: Any, dataset: Any, ranks: Sequence[int], num_replicas: int, **changed: Any
) -> Any:
    """Make a `DataLoader` of the rows of one worker.

    Args:
        loader: `torch.utils.data.DataLoader` of global batches.
        dataset: Its dataset, or one of as many rows.
        ranks: Sequence of ints, consecutive, the replicas of this worker.
        num_replicas: Int, on all workers.
        **changed: Settings that it does not have of the given one.
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
    own = OwnBatches(loader.batch_sampler, ranks, num_replicas)
    return torch.utils.data.DataLoader(
        dataset, batch_sampler=own, **(settings | changed)
    )


def items_of(own: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a loader of this worker's rows.

    Args:
        own: What `loader_of_rows` returned.

    Yields:
        Dict of `rows`, a tuple of arrays, and the `total`, an array of one number.
    """
    batches = iter(own)
    totals = own.batch_sampler.totals
    for batch in batches:
        yield _item(batch, totals.popleft())


def first_items(loader: Any, ranks: Sequence[int], num_replicas: int) -> tuple:
    """Read this worker's rows of the first batches, as Keras does for the spec.

    Returns:
        Tuple: list of dicts as those of `items_of`, and whether the dataset draws
        random numbers. If so, all generators are as before: Keras reads them again.
    """
    import torch

    def collate(pairs: list[tuple]) -> tuple:
        items, is_random = zip(*pairs, strict=True)
        return torch.utils.data.default_collate(list(items)), any(is_random)

    generators = _generators(loader)
    before = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    watched = Watched(loader.dataset)
    own = loader_of_rows(
        loader,
        watched,
        ranks,
        num_replicas,
        collate_fn=collate,
        persistent_workers=False,
    )
    items, draws = [], False
    batches = iter(own)
    for _, (batch, is_random) in zip(range(_BATCHES_FOR_SPEC), batches, strict=False):
        items.append(_item(batch, own.batch_sampler.totals.popleft()))
        draws |= is_random
    del batches  # ends its processes
    if draws:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
    return items, draws


def generator_states(loader: Any) -> list[str]:
    """Return a digest of each random generator that orders a loader's rows."""
    return [
        hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()
        for generator in _generators(loader)
    ]


def seed_generators(loader: Any, seed: int) -> None:
    """Seed each random generator that orders a loader's rows."""
    for generator in _generators(loader):
        generator.manual_seed(seed)


def _generators(loader: Any) -> list[Any]:
    """Return torch's generator, and those of a loader and its sampler."""
    import torch

    found = [torch.default_generator]
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if generator is not None and all(generator is not other for other in found):
            found.append(generator)
    return found


def _item(batch: Any, total: int) -> dict[str, Any]:
    # As Keras converts them.
    rows = keras.tree.map_structure(
        lambda part: None if part is None else np.asarray(part.cpu()), batch
    )
    return {"rows": tuple(rows), "total": np.array([total], "int64")}


def _random_states() -> list:
    import torch

    of_numpy: Any = np.random.get_state()
    return [
        random.getstate(),
        [np.asarray(part).tolist() for part in of_numpy],
        torch.get_rng_state().numpy().tobytes(),
    ]
