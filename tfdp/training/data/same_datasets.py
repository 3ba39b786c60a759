"""Comparison of the workers' datasets: order, shards, length and rows of batches.

The lengths determine the number of steps of an epoch, the same on all workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp.communication.coordination.facts import SharedFact, compare, explain
from tfdp.ground import user_code
from tfdp.ground._compat import tf_data
from tfdp.ground.base import loops
from tfdp.training.data.batch_sizes import describe_sizes, sizes_of_batches
from tfdp.training.data.element_specs import describe_spec, without_unknown_sizes
from tfdp.training.data.fingerprints import ArrayValues
from tfdp.training.data.per_replica_dataset import ReadOptions
from tfdp.training.data.stages import gathers_array_rows
from tfdp.training.data.value_differences import values_fact

_TOPIC = "a dataset's order and length"
ENDLESS = math.inf


def compare_datasets(strategy: Any, dataset: tf.data.Dataset) -> ReadOptions:
    """Compare a dataset with those of the other workers.

    Returns:
        `ReadOptions`: whether some workers may run out of data before others, and
        whether batch i has the same number of rows on all workers.

    Raises:
        ValueError: If workers would shuffle differently, if their elements have
            different specs, or if their source tensors have different values.
    """
    worker_group = strategy.extended.worker_group
    if worker_group.num_workers == 1:
        return ReadOptions(syncs_end_of_data=False)
    extra = [
        tf_data.shuffle_seeds(dataset),
        int(dataset.cardinality().numpy()),
        sizes_of_batches(dataset),
        tf_data.shards_of(dataset),
    ]
    facts = [
        elements_fact(dataset),
        values_fact(worker_group, _TOPIC, values_of_sources(dataset)),
    ]
    gathered = compare(worker_group, _TOPIC, facts, extra)
    seeds, lengths, sizes, shards = zip(*gathered, strict=True)
    _check_same_shuffle(list(seeds))
    warn_of_shards(shards)
    if _lengths_differ(strategy, list(lengths)):
        return ReadOptions(syncs_end_of_data=True, same_rows=False)
    return ReadOptions(syncs_end_of_data=False, same_rows=_have_same_rows(sizes))


def list_by_worker(values: Iterable[Any]) -> str:
    """Format one value of each worker as a text, for a message.

    Args:
        values: Iterable, ordered by worker.

    Example:

    >>> list_by_worker([3, "no file"])
    '3 on worker 0, no file on worker 1'
    """
    return ", ".join(f"{each} on worker {rank}" for rank, each in enumerate(values))


def values_of_sources(dataset: tf.data.Dataset) -> ArrayValues:
    """Return the values of the tensors and file names that a dataset is made of.

    The output of `map` and later stages is left out, because it may be random. The
    arrays passed to `fit` are left out, because
    `tfdp.training.keras_hooks.loop_agreement` has compared them.
    """
    has_fit_arrays = any(
        gathers_array_rows(part) for part in tf_data.dataset_inputs(dataset)
    )
    sources = {} if has_fit_arrays else tf_data.sources_of(dataset)
    return ArrayValues(sources, are_sources=True)


def elements_fact(dataset: tf.data.Dataset) -> SharedFact:
    """Return the element spec as a `SharedFact`, which must be equal on all workers.

    With other structures, dtypes or shapes, workers would run different steps, whose
    collectives would wait for each other indefinitely.
    """
    problem = (
        "Workers have datasets whose elements differ in structure, type or shape. "
        "Build the same pipeline on every worker."
    )

    def explain_elements(specs: dict[int, dict]) -> str:
        """Return the error text; `""` if only sizes differ that a worker does not know.

        Args:
            specs: Dict from the rank of each worker to the result of `describe_spec`
                there.
        """
        parts = without_unknown_sizes(list(specs.values()))
        parts_by_path = [
            {f"batch{where}": part for where, part in described.items()}
            for described in parts
        ]
        return explain(problem, dict(enumerate(parts_by_path)))

    return SharedFact("elements", describe_spec(dataset.element_spec), explain_elements)


def _check_same_shuffle(seeds: list) -> None:
    """Raise if workers would shuffle a dataset differently.

    Args:
        seeds: List with one item for each worker: a list of the pairs of seeds of its
            `shuffle` stages, `[0, 0]` without a seed.
    """
    unseeded = any([0, 0] in own for own in seeds)
    if unseeded or any(own != seeds[0] for own in seeds):
        raise ValueError(
            "Workers would shuffle this dataset differently, so that samples are read "
            "twice or not at all. Give `shuffle` the same `seed` on every worker, or "
            "create the dataset after the strategy, which sets a common seed. "
            f"Received: the seeds {seeds[0]} on worker 0, {seeds[-1]} on worker "
            f"{len(seeds) - 1}"
        )


def warn_of_shards(shards: Sequence[list]) -> None:
    """Warn if the workers have different `Dataset.shard`s in their datasets.

    Each worker takes its rows of each batch, so the other rows of its shard would never
    be read.

    Args:
        shards: Sequence of lists, for each worker the number of shards and the index
            of each `Dataset.shard` in its dataset.
    """
    if all(own == shards[0] for own in shards):
        return
    calls = list_by_worker(map(_shard_calls, shards))
    user_code.warn(
        "This dataset is divided twice, so that some of its elements are never read: "
        "each worker has its own shard, and trains on only a part of each batch of it. "
        "Remove `shard`, and batch by the global batch size on every worker; or keep "
        f"it and set `AutoShardPolicy.OFF`. Received: {calls}"
    )


def _shard_calls(shards: list) -> str:
    """Format the `Dataset.shard` calls of one worker for a message.

    Args:
        shards: List of pairs of the number of shards and the index.

    Returns:
        String, such as "`shard(2, 0)`", or "no `shard`".
    """
    calls = [f"`shard({count}, {index})`" for count, index in shards]
    return ", ".join(calls) or "no `shard`"


def stops_at_shortest(strategy: Any) -> bool:
    """Return whether the worker with the least data ends an epoch for all workers.

    True only with `uneven="stop"`, while the running loop of Keras is a `fit` that has
    not read its training data yet: evaluation and prediction need every sample.
    """
    is_for_training = loops.awaiting_training_data() is not None
    return is_for_training and strategy.extended.options.uneven == "stop"


def _lengths_differ(strategy: Any, lengths: list[int]) -> bool:
    """Return whether some workers may run out of data before others.

    It also warns if the lengths are known to differ.

    Args:
        strategy: A tfdp strategy.
        lengths: List of ints, the cardinality of each worker's dataset.
    """
    same = len(set(lengths)) == 1
    # If an epoch ends with the shortest dataset, `tfdp.training.data.epochs` warns of
    # the dropped batches, so a second warning here would be noise.
    if not same and not stops_at_shortest(strategy):
        listed = list_by_worker(map(Length.of_cardinality, lengths))
        user_code.warn(
            "Workers have datasets of different length; each should read the same "
            "global batches. All workers continue until the longest dataset ends; "
            f"workers without data get empty batches. Received batches: {listed}"
        )
    return not same or lengths[0] == tf.data.UNKNOWN_CARDINALITY


def _have_same_rows(sizes: Sequence[dict[str, Any] | None]) -> bool:
    """Return whether batches are known to have the same size on all workers.

    The user is warned if sizes are known and differ. If those of a worker are unknown,
    the result is `False`, without a warning.

    Args:
        sizes: Sequence with a dict for each worker, which `sizes_of_batches` returned
            and which describes the rows of each batch; or `None` if they are unknown.
    """
    known = [each for each in sizes if each is not None]
    if len(known) < len(sizes):
        return False
    same = all(each == known[0] for each in known)
    if not same:
        listed = list_by_worker(map(describe_sizes, known))
        user_code.warn(
            "Workers have datasets with batches of different sizes; each should read "
            "the same global batches, which tfdp divides, or its own data with "
            f"`AutoShardPolicy.OFF`. Received: {listed}"
        )
    return same


class Length(NamedTuple):
    """Length of one worker's data.

    Args:
        steps: Int, number of steps; `ENDLESS`, or `None` if only reading shows it.
        steps_per_batch: Float, number of steps that one batch supplies. Defaults to 1.
        batch_rows: Int, rows of a batch of arrays, or `None` for other data. Defaults
            to `None`.
        last_rows: Int, rows of a smaller last batch, or 0. Defaults to 0.
    """

    steps: float | None
    steps_per_batch: float = 1
    batch_rows: int | None = None
    last_rows: int = 0

    @classmethod
    def of_cardinality(cls, cardinality: int) -> Length:
        """Return the length of a `tf.data.Dataset` of this cardinality.

        Example:

        >>> [str(Length.of_cardinality(number)) for number in (4, -1, -2)]
        ['4', 'endlessly many', 'an unknown number']
        """
        steps_by_constant = {
            tf.data.INFINITE_CARDINALITY: ENDLESS,
            tf.data.UNKNOWN_CARDINALITY: None,
        }
        return cls(steps_by_constant.get(cardinality, cardinality))

    @property
    def is_endless(self) -> bool:
        """Bool, whether the data never ends."""
        return self.steps == ENDLESS

    def __str__(self) -> str:
        """Format the number of batches, such as '4' or 'endlessly many'."""
        return _format_batches(self.steps, self.steps_per_batch)


def agreed_steps(lengths: Sequence[Length], *, stops: bool) -> int | None:
    """Return the number of steps after which an epoch ends for all workers.

    Args:
        lengths: Sequence of `Length`, one for each worker.
        stops: Bool, whether the epoch ends when the first worker runs out of data, and
            not the last.

    Returns:
        Int, or `None` if the number is not known before reading, or has no end.

    Example:

    >>> lengths = [Length(4), Length(6), Length(ENDLESS)]
    >>> agreed_steps(lengths, stops=True), agreed_steps(lengths, stops=False)
    (4, None)
    """
    known = [length.steps for length in lengths if length.steps is not None]
    if len(known) < len(lengths):
        return None
    steps = min(known) if stops else max(known)
    return None if steps == ENDLESS else int(steps)


def dropped_batches(lengths: Sequence[Length]) -> str:
    """Describe the batches beyond the shortest worker's; `""` if none are known.

    Args:
        lengths: Sequence of `Length`, one for each worker.

    Example:

    >>> dropped_batches([Length(4), Length(6), Length(4), Length(ENDLESS)])
    '2 of worker 1, endlessly many of worker 3'
    """
    steps = agreed_steps(lengths, stops=True)
    if steps is None:
        return ""
    excess = [
        (rank, length.steps - steps, length.steps_per_batch)
        for rank, length in enumerate(lengths)
        if length.steps is not None and length.steps > steps
    ]
    return ", ".join(
        f"{_format_batches(n, each)} of worker {rank}" for rank, n, each in excess
    )


def _format_batches(steps: float | None, steps_per_batch: float) -> str:
    """Format a number of steps as a number of batches.

    Args:
        steps: Float, number of steps, `ENDLESS`, or `None` if it is unknown.
        steps_per_batch: Float, number of steps that one batch supplies.

    Returns:
        String: the number, such as "4", "endlessly many" for `ENDLESS`, or "an unknown
        number" for `None`.
    """
    if steps is None:
        return "an unknown number"
    if steps == ENDLESS:
        return "endlessly many"
    return f"{steps / steps_per_batch:g}"
