"""Position of `fit` in its data, which a resumed run restores.

A seeded pipeline gives the same batches in every run. So the position is the number of
batches taken, and skipping them restores it. A seeded shuffle has another order for
each iterator of the dataset, so the position also has the number of iterators.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground._compat import keras_data, random_seeds, tf_data
from tfdp.ground.base.step_context import ThreadStack
from tfdp.ground.text import pluralize
from tfdp.training.data.batch_change import BatchChange
from tfdp.training.data.batch_sizes import batch_size_of
from tfdp.training.data.determinism import (
    SeededShuffle,
    batch_dependence_of,
    draws_seeds_once,
    nondeterminism_of,
)
from tfdp.training.data.file_shards import FileShard

# Loops may be nested, for example if a callback of `fit` calls `evaluate`. The last
# position is that of the innermost loop, or `None` if that loop is not tracked.
_positions: ThreadStack[DataPosition | None] = ThreadStack("data positions")
# Error texts show the keys of a description of the data, so each key is a phrase.
_NUM_BATCHES = "the number of batches"


class DataPosition:
    """Position in the data of one `fit`.

    Args:
        validation: The `validation_data` of `fit`. Its shuffles, whose seeds those of
            the training data may share, are restored too. Defaults to `None`.
        validation_steps: Int, `validation_steps` of `fit`, or `None`, the default.

    Attributes:
        exit_stack: `contextlib.ExitStack`, closed when `fit` returns or raises.
        iterator: Epoch iterator of Keras for the training data; `None` until `attach`.
        last_logs: Dict, the logs of the last batch before the interruption, until the
            interrupted epoch ends; or `None`.
        nondeterminism: String, why the position cannot be restored, or `None`.
    """

    def __init__(
        self, validation: Any = None, validation_steps: int | None = None
    ) -> None:
        is_dataset = isinstance(validation, tf.data.Dataset)
        reshuffles = is_dataset and tf_data.reshuffles(validation)
        self._validation = validation if reshuffles else None
        self._validation_steps = validation_steps
        # Shuffles of the validation data may share seeds with those of the training
        # data. So a restored run creates both kinds of iterators in their old order. A
        # pair stands for an iterator of the validation data: the number of iterators of
        # the training data before it, and whether its batches were read.
        self._validations: list[list] = []
        self.exit_stack = contextlib.ExitStack()
        self.last_logs: dict[str, Any] | None = None
        self.nondeterminism: str | None = None
        self._dependence: str | None = None
        self.iterator: Any = None
        self._make: Callable = iter
        self._order: SeededShuffle | None = None
        # The list has an entry for each iterator, the number of batches taken from it.
        # A restored run skips as many.
        self._taken: list[int] = []
        self._skipped = 0
        self._stand_in_seed: int | None = None

    def attach(
        self,
        iterator: Any,
        stand_in_seed: int | None = None,
        worker_group: WorkerGroup | None = None,
    ) -> None:
        """Begin to count the batches of one of Keras's epoch iterators.

        All workers call it, and exchange descriptions of their data.

        Args:
            iterator: `TFEpochIterator` that has not begun an epoch.
            stand_in_seed: Int, the global seed that tfdp drew for this run because the
                user set none, or `None`. Defaults to `None`.
            worker_group: `WorkerGroup` between the workers, whose data may differ, or
                `None` for one worker. Defaults to `None`.
        """
        self.iterator = iterator
        self._adapter = iterator.data_adapter
        self._source = keras_data.source_of(self._adapter)
        self._is_dataset = isinstance(self._source, tf.data.Dataset)
        self._stand_in_seed = stand_in_seed
        self._make = keras_data.dataset_maker(iterator)
        self._order = self._make if isinstance(self._make, SeededShuffle) else None
        keras_data.set_dataset_of_epoch(iterator, self._begin_iterator)
        facts = {
            "description": self._describe(),
            "nondeterminism": self._local_nondeterminism(),
            "dependence": self._local_batch_dependence(),
            "batch size": self._batch_size(),
        }
        facts_by_worker: list[Any] = [facts]
        if worker_group is not None:
            facts_by_worker = worker_group.all_gather("the position in the data", facts)
        self._descriptions = [item["description"] for item in facts_by_worker]
        # All workers restore their positions, or none does. So if the order of the data
        # is not reproducible on some worker, its reason applies to all workers.
        self.nondeterminism = _first_not_none(
            item["nondeterminism"] for item in facts_by_worker
        )
        self._dependence = _first_not_none(
            item["dependence"] for item in facts_by_worker
        )
        self._first_batch_size = facts_by_worker[0]["batch size"]

    def attach_validation(self, iterator: Any) -> None:
        """Begin to record when the validation data is iterated over.

        Args:
            iterator: `TFEpochIterator` of the validation data.
        """
        if self._validation is None:
            return
        make = keras_data.dataset_maker(iterator)

        def begin_iterator() -> Any:
            """Record an iterator of the validation data, and return its dataset."""
            is_read = keras_data.is_read_immediately(iterator)
            self._validations.append([len(self._taken), is_read])
            return make()

        keras_data.set_dataset_of_epoch(iterator, begin_iterator)

    @property
    def dataset(self) -> Any:
        """Distributed dataset that Keras iterates over in an epoch."""
        return keras_data.distributed_dataset(self.iterator)

    def _local_nondeterminism(self) -> str | None:
        """Describe why a rerun reads other batches on this worker; else `None`."""
        adapter = self._adapter
        has_seed = self._order is not None or random_seeds.global_seed() is not None
        has_order = has_seed and not keras_data.has_py_dataset(adapter)
        is_ordered = has_order or not keras_data.shuffles(adapter)
        return nondeterminism_of(
            self._source, is_ordered=is_ordered, stand_in_seed=self._stand_in_seed
        )

    def fit_arguments(self) -> dict[str, Any]:
        """Return `batch_size`, `steps_per_epoch` and `steps_per_execution`, by name.

        A run that resumes this `fit` must have the same ones, unless a `BatchChange`
        converts its position.
        """
        return {
            "batch_size": self._first_batch_size,
            "steps_per_epoch": self.iterator.steps_per_epoch,
            "steps_per_execution": self.iterator.steps_per_execution,
        }

    def _batch_size(self) -> int | None:
        """Return the number of samples of a global batch, or `None` if unknown."""
        batch_size = getattr(self._adapter, "batch_size", None)
        if batch_size is None and self._is_dataset:
            batch_size = batch_size_of(self._source)
        return batch_size

    def snapshot(self) -> dict[str, Any]:
        """Return the position between two epochs as a dict for JSON.

        Returns:
            Dict of `"steps_seen"` and `"num_batches"`, the counters of Keras's
            iterator; `"taken"` and `"validations"`, the arguments of
            `_recreate_iterators`; `"order"`, the first seed of a `SeededShuffle` or
            `None`; and `"description"`, the properties of the data, a dict or, if
            workers differ, a list of one for each worker.
        """
        return {
            **keras_data.epoch_progress(self.iterator),
            "taken": list(self._taken),
            "validations": list(self._validations),
            "order": None if self._order is None else self._order.first,
            "description": _common_or_list(self._descriptions),
        }

    def difference_to(
        self, snapshot: dict[str, Any], change: BatchChange | None = None
    ) -> str | None:
        """Describe why the position of a snapshot cannot be restored.

        Args:
            snapshot: Dict that `snapshot` returned.
            change: `BatchChange` if batches have another size now, or `None`.
                Defaults to `None`.

        Returns:
            String, a difference of the data or a reason why its order cannot be
            repeated; or `None` if the position can be restored.
        """
        difference = _difference(snapshot["description"], self._descriptions, change)
        if difference is not None:
            return difference
        if (snapshot["order"] is None) != (self._order is None):
            return "arrays are shuffled with another seed"
        return self.nondeterminism or (None if change is None else self._dependence)

    def _local_batch_dependence(self) -> str | None:
        """Describe why the order of samples depends on the batch size; else `None`."""
        if self.iterator.steps_per_epoch and self._adapter.num_batches is not None:
            return (
                "the size of its batches has changed, and `steps_per_epoch` ends "
                "epochs before the end of the data"
            )
        return batch_dependence_of(
            self._source,
            shuffles_batches=keras_data.shuffles_in_batches(self._adapter),
        )

    def restore(self, snapshot: dict[str, Any], num_batches: int) -> None:
        """Restore a position, at which the next epoch continues.

        Args:
            snapshot: Dict that `snapshot` returned when the interrupted epoch began.
            num_batches: Int, number of batches taken in that epoch.
        """
        taken = snapshot["taken"]
        if self._order is not None:
            self._order.first = snapshot["order"]
        keeps_one = self.iterator.steps_per_epoch is not None and bool(taken)
        validations = snapshot.get("validations", [])
        current = self._recreate_iterators(taken, validations, keeps_one)
        keras_data.set_epoch_progress(self.iterator, snapshot, current)
        self._skipped = num_batches

    def restore_length(self, snapshot: dict[str, Any]) -> None:
        """Restore only the length of an epoch; the data starts from the beginning."""
        keras_data.set_epoch_progress(
            self.iterator, {**snapshot, "steps_seen": 0}, None
        )

    def enumerate(self, batches: Iterator) -> Iterator:
        """Yield the batches of an epoch of Keras, without those that `restore` skips.

        All of them are counted as taken.

        Args:
            batches: Iterator of Keras's tuples: first step, last step and the data.

        Yields:
            The tuples of `batches`.
        """
        skipped, self._skipped = self._skipped, 0
        for first, last, data in batches:
            self._taken[-1] += last - first + 1
            if first < skipped:
                _skip(data, last - first + 1)
            else:
                yield first, last, data

    def _begin_iterator(self) -> Any:
        """Return the dataset of the next epoch, and begin to count its batches."""
        self._taken.append(0)
        return self._make()

    def _recreate_iterators(
        self, taken: list[int], validations: list[list], keeps_one: bool
    ) -> Any:
        """Create the iterators of earlier epochs that affect the order of later ones.

        Args:
            taken: List of ints, number of batches taken from each iterator.
            validations: List with a pair for each iterator of the validation data: the
                number of iterators of the training data before it, and whether its
                batches were read.
            keeps_one: Bool, whether the last iterator continues in the next epoch.

        Returns:
            The last iterator, at its position, if it continues; or else `None`.
        """
        source = self._source
        reshuffles = self._is_dataset and tf_data.reshuffles(source)
        depends_on_reads = reshuffles and not draws_seeds_once(source)
        last = len(taken) - 1
        for number in range(len(self._taken), len(taken)):
            self._recreate_validations(validations, number)
            is_current = keeps_one and number == last
            if depends_on_reads or is_current:
                if self._order is not None:
                    self._order.epoch = number
                current = iter(self._make())
                _skip(current, taken[number])
                if is_current:
                    self._taken = list(taken)
                    self._recreate_validations(validations, len(taken))
                    return current
            elif reshuffles and taken[number]:
                tf_data.begin_shuffles(source)
            elif reshuffles:
                # Keras created the epoch's iterator, but read no batch. So only the
                # last of several shuffles drew a seed. `iter(source)` draws it again.
                iter(source)
        self._taken = list(taken)
        self._recreate_validations(validations, len(taken))
        if self._order is not None:
            self._order.epoch = len(taken)
        return None

    def _recreate_validations(self, validations: list[list], number: int) -> None:
        """Draw the validation data's shuffle seeds again, as at a point of training.

        Args:
            validations: List of pairs, as for `_recreate_iterators`. Those with another
                number than `number` are ignored.
            number: Int, the point in training: how many iterators of the training data
                had been created.
        """
        for after, is_read in validations:
            if self._validation is None or after != number:
                continue
            self._validations.append([after, is_read])
            if not is_read:
                iter(self._validation)
            elif draws_seeds_once(self._validation):
                tf_data.begin_shuffles(self._validation)
            else:
                _skip(iter(self._validation), self._validation_steps)

    def _describe(self) -> dict[str, Any]:
        """Return, by name, the properties of the data that a resumed run must share."""
        source = self._source
        seeds = tf_data.shuffle_seeds(source) if self._is_dataset else []
        uses_global = self._order is None and keras_data.shuffles_arrays(self._adapter)
        return {
            "the kind of the data": type(source).__name__.strip("_"),
            _NUM_BATCHES: self._adapter.num_batches,
            "the seeds of `Dataset.shuffle`": [list(pair) for pair in seeds],
            "the global seed": random_seeds.global_seed() if uses_global else None,
            **(_describe_files(source) if self._is_dataset else {}),
        }


@contextlib.contextmanager
def tracking(position: DataPosition | None) -> Iterator[None]:
    """Open a context for one Keras loop, in which `current` returns `position`.

    The end of the context closes the position's `exit_stack`.
    """
    try:
        with _positions.pushed(position):
            yield
    finally:
        if position is not None:
            position.exit_stack.close()


def current() -> DataPosition | None:
    """Return the data position of the innermost running loop, or `None`."""
    return _positions.innermost


def enumerate_batches(original: Callable, iterator: Any) -> Iterator:
    """Yield the batches of an epoch, without those before a restored position.

    Args:
        original: Keras's method of the iterator that enumerates an epoch.
        iterator: Epoch iterator of Keras.
    """
    position = current()
    batches = original(iterator)
    if position is None or position.iterator is not iterator:
        return batches
    return position.enumerate(batches)


def _describe_files(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Return properties of the files of `shard_files` by name; empty for other data."""
    shard = FileShard.of_dataset(dataset)
    if shard is None:
        return {}
    return {
        "the set of files": shard.digest,
        "the number of workers that share files": shard.num_workers,
    }


def _common_or_list(descriptions: list[dict]) -> Any:
    """Return the first description, a dict, if all are equal; or else the list."""
    alike = all(other == descriptions[0] for other in descriptions)
    return descriptions[0] if alike else descriptions


def _difference(then: Any, now: list[dict], change: BatchChange | None) -> str | None:
    """Describe how the data differs from a saved description; `None` if it does not.

    Args:
        then: Dict, the common saved description, or a list with one for each worker.
        now: List of dicts, the current description of each worker.
        change: `BatchChange` if batches have another size now, or `None`.
    """
    if isinstance(then, dict):
        then = [then] * len(now)
    if len(then) != len(now):
        had = pluralize(len(then), "worker")
        return f"{had} had their own data, and there are now {len(now)}"
    for before, after in zip(then, now, strict=True):
        for name, value in before.items():
            is_alike = after.get(name) == value
            if change is not None and name == _NUM_BATCHES:
                is_alike = change.fits(value, after.get(name))
            if not is_alike:
                return f"{name} was {value} and is {after.get(name)}"
    return None


def _first_not_none(values: Iterable[str | None]) -> str | None:
    """Return the first value that is not `None`, or `None`."""
    return next((item for item in values if item is not None), None)


def _skip(iterator: Any, count: int | None) -> None:
    """Read and drop `count` batches of an iterator; for `None`, all that are left.

    An earlier end of the data is not an error.
    """
    local = getattr(iterator, "components", iterator)
    for _ in itertools.islice(local, count):
        pass
