"""Whether a data pipeline gives the same batches when a script is started again."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat

# They call Python, of which nobody knows what it remembers.
_CALLS_PYTHON = ("GeneratorDataset", "PyFunc", "EagerPyFunc", "PyFuncStateless")
_RANDOM = (
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
    *("RandomShuffle", "Multinomial", "RandomGamma", "RandomPoissonV2"),
)
# Through these an iterator of the last part begins those of all the others at once.
_BEGINS_ITS_INPUTS = (
    *("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset", "MapDataset"),
    *("ParallelMapDataset", "PrefetchDataset", "TakeDataset", "SkipDataset"),
    *("FilterDataset", "ShuffleDataset", "OptionsDataset", "ZipDataset"),
    *("TensorDataset", "TensorSliceDataset", "RangeDataset", "RebatchDataset"),
)
# What may come after the batches are made, if samples stay where they are.
_KEEPS_BATCHES = (
    *("MapDataset", "ParallelMapDataset", "PrefetchDataset", "OptionsDataset"),
    *("CacheDataset", "ModelDataset"),
)
_MAKES_BATCHES = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset")


def difficulty_of(
    source: Any, *, is_ordered: bool, chosen_seed: int | None = None
) -> str | None:
    """What keeps a pipeline from giving the same batches again.

    Args:
        source: What Keras's data adapter reads.
        is_ordered: Bool, whether the order of arrays is known.
        chosen_seed: Int, a global seed that the next run will not have, or `None`.
            Defaults to `None`.

    Returns:
        String that names it, or `None`.
    """
    if isinstance(source, tf.data.Dataset):
        return _difficulty_of_dataset(source, chosen_seed)
    if isinstance(source, keras.utils.PyDataset):
        return _difficulty_of_py_dataset(source, is_ordered)
    if callable(source):
        return "a Python generator begins anew"
    return None if is_ordered else "arrays are shuffled without a seed"


def draws_at_the_start(dataset: Any) -> bool:
    """Whether an iterator takes the seeds of its shuffles when it is made.

    If not, when it comes to them, so that the order of an epoch depends on what was
    read of those before.
    """
    kinds = _compat.kinds_of_parts(dataset)
    return all(kind in _BEGINS_ITS_INPUTS for kind in kinds)


def batch_dependence_of(source: Any, *, shuffles_batches: bool) -> str | None:
    """Why samples come in another order where batches have another size.

    Args:
        source: What Keras's data adapter reads.
        shuffles_batches: Bool, whether arrays are shuffled in batches.

    Returns:
        String, or `None` if they come in the same order.
    """
    if shuffles_batches:
        return "the size of its batches has changed, and arrays are shuffled in batches"
    if not isinstance(source, tf.data.Dataset):
        return None
    for kind in _compat.kinds_of_parts(source):
        if kind in _MAKES_BATCHES:
            return None
        if kind not in _KEEPS_BATCHES:
            return f"the size of its batches has changed, and a {kind} comes after them"
    return None


def _difficulty_of_dataset(
    dataset: tf.data.Dataset, chosen_seed: int | None
) -> str | None:
    unseeded = _compat.unseeded_parts(dataset)
    if "ShuffleDataset" in unseeded:
        return "`Dataset.shuffle` has no seed"
    if unseeded:
        return f"a {unseeded[0]} has no seed"
    if _compat.is_unordered(dataset):
        return "the dataset is asked for speed, and not for one order (`deterministic`)"
    if chosen_seed in {seed for seed, _ in _compat.shuffle_seeds(dataset)}:
        return "the global seed, which `Dataset.shuffle` depends on, was not set"
    for name, attributes in _compat.operations_in(dataset):
        if name in _CALLS_PYTHON:
            return "a Python generator or function in the dataset has state of its own"
        if name not in _RANDOM:
            continue
        seed, seed2 = attributes["seed"].i, attributes["seed2"].i
        if (seed, seed2) == (0, 0) or seed == chosen_seed:
            return f"the random operation {name} in the dataset has no seed"
    return None


def _difficulty_of_py_dataset(source: Any, is_ordered: bool) -> str | None:
    if not is_ordered:
        return "a `PyDataset` is shuffled"
    for name in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(source), name) is not getattr(keras.utils.PyDataset, name):
            return f"a `PyDataset` changes in `{name}`"
    return None
