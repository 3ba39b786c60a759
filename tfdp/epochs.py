"""The length and the order of an epoch, on which all workers agree."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

from tfdp import _compat, data_position
from tfdp.data import steps_per_batch
from tfdp.data_position import SeededOrder
from tfdp.iterators import ShareDataset
from tfdp.ownership import is_ours
from tfdp.places import here


def make_iterator(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Makes Keras's epoch iterator, alike on all workers."""
    original(iterator, *args, **kwargs)
    strategy: Any = kwargs.get("distribute_strategy", args[0] if args else None)
    _agree(strategy, iterator)
    position = data_position.current()
    if position is not None and position.iterator is None:
        if _compat.shuffles_arrays(iterator.data_adapter) and not _has_order(iterator):
            _compat.set_dataset_of_epoch(
                iterator, SeededOrder(_new_seed(), lambda: _dataset(strategy, iterator))
            )
        own = getattr(strategy.extended, "chosen_seed", None)
        position.attach(iterator, own)


def _agree(strategy: Any, iterator: Any) -> None:
    if is_ours(strategy) and strategy.extended.agreement.num_workers > 1:
        adapter = iterator.data_adapter
        alike = _agree_on_length(strategy, iterator)
        # Of arrays all know the number of batches, though the dataset does not.
        is_settled = alike and _compat.holds_arrays(adapter)
        _settle(_compat.distributed_dataset(iterator), is_settled)
        _agree_on_shuffling(strategy, iterator, is_settled)


def begin_epoch(original: Callable, iterator: Any) -> Any:
    """Notes that a loop goes through its data, from the begin."""
    here.epoch_begins()
    return original(iterator)


def next_step(original: Callable, iterator: Any) -> Any:
    """Notes which step a loop has come to."""
    step = original(iterator)
    here.step_begins(step[0])
    return step


def _agree_on_shuffling(strategy: Any, iterator: Any, is_settled: bool) -> None:
    """Lets all workers shuffle the user's arrays alike.

    Workers that were seeded alike already do. Otherwise all take the first
    one's seeds, another one in each epoch: TensorFlow repeats the permutation
    of a seeded dataset, and who sets no seed expects a new one each time.
    """
    if not _compat.shuffles_arrays(iterator.data_adapter):
        return
    extended = strategy.extended
    same, _ = extended.agreement.same("shuffling", _compat.random_state())
    if same and _compat.global_seed() != extended.chosen_seed:
        return  # the user's own seed, as on one device
    if not same:
        warnings.warn(
            "Workers have different random seeds. They shuffle in the first "
            "worker's order; call `keras.utils.set_random_seed` with one seed on "
            "all of them.",
            stacklevel=2,
        )
    first = int(extended.agreement.exchange("a seed", str(_new_seed()))[0])

    def of_epoch() -> Any:
        return _settle(_dataset(strategy, iterator), is_settled)

    _compat.set_dataset_of_epoch(iterator, SeededOrder(first, of_epoch))


def _has_order(iterator: Any) -> bool:
    """Whether the order of shuffled arrays can be repeated."""
    is_ours = isinstance(_compat.dataset_maker(iterator), SeededOrder)
    return is_ours or _compat.global_seed() is not None


def _new_seed() -> int:
    """A seed from the operating system: the user's generators stay untouched."""
    return random.SystemRandom().getrandbits(30)


def _dataset(strategy: Any, iterator: Any) -> Any:
    """The distributed dataset of the arrays that Keras has been given."""
    dataset = iterator.data_adapter.get_tf_dataset()
    return strategy.experimental_distribute_dataset(dataset)


def _agree_on_length(strategy: Any, iterator: Any) -> bool:
    """Lets every worker count the same number of steps in an epoch.

    Returns:
        Bool, whether all know the same number by themselves.
    """
    adapter = iterator.data_adapter
    own = adapter.num_batches
    factor = steps_per_batch(strategy, getattr(adapter, "_dataset", None))
    texts = strategy.extended.agreement.exchange(
        "the number of batches", "" if own is None else str(own * factor)
    )
    unknown = "" in texts
    if len(set(texts)) == 1 and factor == 1:
        return not unknown
    agreed = None if unknown else max(int(text) for text in texts)
    iterator.data_adapter = _WithLength(adapter, agreed)
    iterator.reset()
    return False


def _settle(dataset: Any, is_settled: bool) -> Any:
    """Lets each batch tell the rows of its global batch, and asks nobody for more.

    Args:
        dataset: A distributed dataset.
        is_settled: Bool, whether all workers have equally many batches for sure.

    Returns:
        The same dataset.
    """
    if isinstance(dataset, ShareDataset):
        dataset.counts = True
        dataset.asks = dataset.asks and not is_settled
    return dataset


class _WithLength:
    """A data adapter of Keras whose number of batches all workers agree on."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
