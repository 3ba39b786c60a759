"""The length and the order of an epoch, on which all workers agree."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

from tfdp import _compat
from tfdp.base import loops
from tfdp.base.ownership import is_ours
from tfdp.coordination.progress import progress
from tfdp.data import position as data_position
from tfdp.data.distribute import ends_with_the_first, is_endless, steps_per_batch
from tfdp.data.end_of_data import CommonEndDataset
from tfdp.data.lengths import ENDLESS, Length, agreed_steps, left_out
from tfdp.data.share_dataset import Reading, ShareDataset
from tfdp.data.shuffle import SeededOrder


def make_iterator(original: Callable, iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Makes Keras's epoch iterator, alike on all workers."""
    strategy: Any = kwargs.get("distribute_strategy", args[0] if args else None)
    original(iterator, *args, **kwargs)
    if is_ours(strategy) and strategy.extended.worker_group.num_workers > 1:
        _agree(
            strategy,
            iterator,
            stops=ends_with_the_first(strategy),
            by_weight=_is_divided_by_weight(strategy, iterator),
        )
    loops.data_is_read()
    position = data_position.current()
    if position is not None and position.iterator is None:
        if _compat.shuffles_arrays(iterator.data_adapter) and not _has_order(iterator):
            _compat.set_dataset_of_epoch(
                iterator, SeededOrder(_new_seed(), lambda: _dataset(strategy, iterator))
            )
        extended = strategy.extended
        position.attach(
            iterator,
            _compat.stand_in_seed(),
            getattr(extended, "worker_group", None),
        )


def _is_divided_by_weight(strategy: Any, iterator: Any) -> bool:
    """Whether the rows of each batch follow the speed of the workers."""
    loop = loops.current()
    is_for_training = loop is not None and loop.awaits_training_data
    if strategy.extended.balance is None or not is_for_training:
        return False
    dataset = _compat.distributed_dataset(iterator)
    if isinstance(dataset, ShareDataset) and dataset.batches is not None:
        return True
    warnings.warn(
        "`--rebalance` has no effect on this data: it is divided among workers by "
        "the dataset's own sharding, and not by tfdp. Batches of all workers, with "
        "`AutoShardPolicy.AUTO` or `DATA`, can be rebalanced.",
        stacklevel=2,
    )
    return False


def _agree(strategy: Any, iterator: Any, *, stops: bool, by_weight: bool) -> None:
    lengths = _exchange_lengths(strategy, iterator.data_adapter)
    if stops:
        _tell_what_is_left_out(strategy.extended, lengths)
    _count_alike(iterator, agreed_steps(lengths, stops=stops))

    def of_loop(dataset: Any) -> Any:
        return _of_loop(dataset, lengths, stops=stops, by_weight=by_weight)

    _compat.set_distributed_dataset(
        iterator, of_loop(_compat.distributed_dataset(iterator))
    )
    _agree_on_shuffling(strategy, iterator, of_loop)


def begin_epoch(original: Callable, iterator: Any) -> Any:
    """Notes that a loop goes through its data, from the begin."""
    progress.epoch_begins()
    return original(iterator)


def next_step(original: Callable, iterator: Any) -> Any:
    """Notes which step a loop has come to."""
    step = original(iterator)
    progress.step_begins(step[0])
    return step


def _agree_on_shuffling(strategy: Any, iterator: Any, of_loop: Callable) -> None:
    """Lets all workers shuffle the user's arrays alike.

    Workers that were seeded alike already do. Otherwise all take the first
    one's seeds, another one in each epoch: TensorFlow repeats the permutation
    of a seeded dataset, and who sets no seed expects a new one each time.
    """
    if not _compat.shuffles_arrays(iterator.data_adapter):
        return
    extended = strategy.extended
    same, _ = extended.worker_group.same("shuffling", _compat.random_state())
    if same and _compat.global_seed() != _compat.stand_in_seed():
        return  # the user's own seed, as on one device
    if not same:
        warnings.warn(
            "Workers have different random seeds. They shuffle in the first "
            "worker's order; call `keras.utils.set_random_seed` with one seed on "
            "all of them.",
            stacklevel=2,
        )
    first = int(extended.worker_group.all_gather("a seed", str(_new_seed()))[0])

    def of_epoch() -> Any:
        return of_loop(_dataset(strategy, iterator))

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


def _exchange_lengths(strategy: Any, adapter: Any) -> list[Length]:
    """What each worker knows of the length of its data."""
    rows = None
    if _compat.holds_arrays(adapter):
        rows = int(adapter.batch_size), int(adapter.partial_batch_size or 0)
    source = _compat.source_of(adapter)
    steps, each = adapter.num_batches, steps_per_batch(strategy, source)
    if steps is not None:
        steps = math.ceil(steps * each)
    elif is_endless(source):
        steps = ENDLESS
    own = Length(steps, each, rows).to_json()
    texts = strategy.extended.worker_group.all_gather("the number of batches", own)
    return [Length.from_json(text) for text in texts]


def _tell_what_is_left_out(extended: Any, lengths: list[Length]) -> None:
    """Warns of batches that are left out, the first time."""
    missed = left_out(lengths)
    if not missed:
        return
    given = ", ".join(f"{length} on worker {r}" for r, length in enumerate(lengths))
    if given in extended.told_of_lengths:
        return
    extended.told_of_lengths.add(given)
    warnings.warn(
        f'Workers have different numbers of batches: {given}. With `uneven="stop"` '
        "each pass of `fit` over the data ends for all of them with the shortest. "
        f"Left out are {missed}.",
        stacklevel=2,
    )


def _count_alike(iterator: Any, steps: int | None) -> None:
    """Lets every worker count the same number of steps in an epoch."""
    adapter = iterator.data_adapter
    if adapter.num_batches != steps:
        iterator.data_adapter = _WithLength(adapter, steps)
        iterator.reset()


def _of_loop(
    dataset: Any, lengths: list[Length], *, stops: bool, by_weight: bool
) -> Any:
    """The data of a loop, which ends for all workers at the same step.

    Args:
        dataset: A distributed dataset.
        lengths: List of `Length`, of all workers.
        stops: Bool, whether the end of one worker's data is that of all.
        by_weight: Bool, see `tfdp.data.share_dataset.Reading`.

    Returns:
        A distributed dataset.
    """
    # Of arrays all know how many rows there are, though the dataset does not.
    is_settled = len(set(lengths)) == 1 and lengths[0].rows is not None
    if isinstance(dataset, ShareDataset):
        asks = dataset.reading.asks and not is_settled
        return dataset.read(Reading(asks, True, stops, by_weight))
    num_endless = sum(length.is_endless for length in lengths)
    if 0 < num_endless < len(lengths):
        dataset = _compat.that_asks(dataset)
    if stops and not is_settled and _compat.asks_for_more(dataset):
        return CommonEndDataset(dataset)
    return dataset


class _WithLength:
    """A data adapter of Keras whose number of batches all workers agree on."""

    def __init__(self, adapter: Any, num_batches: int | None) -> None:
        self._adapter = adapter
        self.num_batches = num_batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)
