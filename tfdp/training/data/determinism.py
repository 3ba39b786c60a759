"""Determinism of a data pipeline: whether a rerun reads the same batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground._compat import keras_data, random_seeds, tf_data
from tfdp.training.data.stages import BATCHES, MAPS, PASS_THROUGH

# TensorFlow's stateful random operations, which a rerun repeats only with a seed.
RANDOM_OPS = (
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
    *("RandomShuffle", "Multinomial", "RandomGamma", "RandomPoissonV2"),
)
# Names of operations that change a variable begin with these words. A variable in a
# pipeline, such as the seed of a layer, has its first value again after a restart, so a
# resumed run reads other batches.
_ASSIGNING_OPS = ("Assign", "ResourceScatter", "Rng")
# A shuffle draws new seeds for each iterator over it. Datasets of these kinds create
# one iterator over each input in a pass, so a shuffle before them draws seeds once.
_ONE_PASS_DATASETS = (
    *(
        *BATCHES,
        *MAPS,
        *PASS_THROUGH,
        "PaddedBatchDataset",
        "TakeDataset",
        "SkipDataset",
    ),
    *("FilterDataset", "ShuffleDataset", "ZipDataset", "AssertCardinalityDataset"),
    *("TensorDataset", "TensorSliceDataset", "RangeDataset", "RebatchDataset"),
    *("InterleaveDataset", "ParallelInterleaveDataset", "FlatMapDataset"),
    "TFRecordDatasetV2",
)
# Stages of these kinds after `batch` keep the order of batches. After any other stage,
# such as a shuffle of batches, the order of samples depends on the batch size.
_ORDER_KEEPING_DATASETS = (*MAPS, *PASS_THROUGH, "CacheDataset", "ModelDataset")


def nondeterminism_of(
    source: Any, *, is_ordered: bool, stand_in_seed: int | None = None
) -> str | None:
    """Describe why a rerun would not read the same batches.

    Args:
        source: The user's data: a dataset, arrays, a `PyDataset` or other.
        is_ordered: Bool, whether Keras reads it in an order that a rerun repeats.
        stand_in_seed: Int, a global seed that tfdp drew for this run only, or `None`.
            Defaults to `None`.

    Returns:
        String, the reason, or `None` if the batches are the same.
    """
    if isinstance(source, tf.data.Dataset):
        return _nondeterminism_of_dataset(source, stand_in_seed)
    if isinstance(source, keras.utils.PyDataset):
        return _nondeterminism_of_py_dataset(source, is_ordered)
    if callable(source):
        return "a Python generator restarts at its beginning"
    if keras_data.is_torch_dataloader(source):
        is_plain = type(source.sampler).__name__ == "SequentialSampler"
        return None if is_plain else "a torch `DataLoader` is shuffled"
    return None if is_ordered else "arrays are shuffled without a seed"


def draws_seeds_once(dataset: Any) -> bool:
    """Return whether each shuffle of a dataset draws its seeds once in an epoch.

    Otherwise a shuffle may draw seeds several times in an epoch, and the order depends
    on how many batches of the earlier epochs were read.
    """
    kinds = tf_data.kinds_of_stages(dataset)
    # A function that captures a dataset creates an iterator of it at every call, for
    # which the shuffles in that dataset draw seeds again.
    is_once = all(kind in _ONE_PASS_DATASETS for kind in kinds)
    return is_once and not tf_data.captures_dataset(dataset)


def batch_dependence_of(source: Any, *, shuffles_batches: bool) -> str | None:
    """Describe why the order of samples depends on the batch size.

    Args:
        source: The user's data: a dataset, arrays, a `PyDataset` or other.
        shuffles_batches: Bool, whether `fit` shuffles arrays with `shuffle="batch"`.

    Returns:
        String, the reason, or `None` if the order does not depend on the batch size.
    """
    if shuffles_batches:
        return "the size of its batches has changed, and arrays are shuffled in batches"
    if not isinstance(source, tf.data.Dataset):
        return None
    for kind in tf_data.kinds_of_stages(source):
        if kind in (*BATCHES, "PaddedBatchDataset"):
            return None
        if kind not in _ORDER_KEEPING_DATASETS:
            return f"the size of its batches has changed, and a {kind} comes after them"
    return None


def _nondeterminism_of_dataset(
    dataset: tf.data.Dataset, stand_in_seed: int | None
) -> str | None:
    """Describe why a rerun of a `tf.data` pipeline differs; `None` if it does not.

    Args:
        dataset: `tf.data.Dataset` whose seeds and functions are inspected.
        stand_in_seed: Int, a global seed that tfdp drew for this run only, or `None`.
            Stages and operations with this seed differ in a rerun.
    """
    unseeded = tf_data.unseeded_stages(dataset)
    if "ShuffleDataset" in unseeded:
        return "`Dataset.shuffle` has no seed"
    if unseeded:
        return f"a {unseeded[0]} has no seed"
    if tf_data.is_unordered(dataset):
        return "the dataset has `deterministic=False`, so that its order varies"
    if stand_in_seed in {seed for seed, _ in tf_data.shuffle_seeds(dataset)}:
        return "the global seed, which `Dataset.shuffle` depends on, was not set"
    if tf_data.calls_python(dataset):
        return "a Python generator or function in the dataset has its own state"
    for name, attributes in tf_data.operations_in(dataset):
        if name.startswith(_ASSIGNING_OPS):
            return (
                "a function in the dataset changes a variable, such as the seeds of a "
                f"layer ({name})"
            )
        if name not in RANDOM_OPS:
            continue
        seed, seed2 = attributes["seed"].i, attributes["seed2"].i
        if (seed, seed2) == (0, 0) or seed == stand_in_seed:
            return f"the random operation {name} in the dataset has no seed"
    return None


def _nondeterminism_of_py_dataset(source: Any, is_ordered: bool) -> str | None:
    """Describe why a rerun of a `PyDataset` differs; `None` if it does not.

    Args:
        source: `keras.utils.PyDataset`.
        is_ordered: Bool, whether Keras reads its batches in the order of their indices.
    """
    if not is_ordered:
        return "a `PyDataset` is shuffled"
    for name in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(source), name) is not getattr(keras.utils.PyDataset, name):
            return f"a `PyDataset` changes in `{name}`"
    return None


def broadcast_seed(worker_group: WorkerGroup) -> int:
    """Broadcast a seed that the first worker draws. All workers call it."""
    return worker_group.all_gather("a seed", new_seed())[0]


def new_seed() -> int:
    """Draw a seed of 30 bits from the operating system, not the user's generators."""
    return random.SystemRandom().getrandbits(30)


class SeededShuffle:
    """Callable that returns shuffled arrays as a dataset, reseeded in each epoch.

    TensorFlow repeats the permutation of a seeded dataset in each epoch, and the
    permutation of an unseeded one cannot be reproduced.

    Args:
        first: Int, seed of the first epoch; each later epoch adds 1.
        make: Callable without arguments that returns the dataset. It is called in each
            epoch, with the epoch's seed as TensorFlow's global seed.
    """

    def __init__(self, first: int, make: Callable) -> None:
        self.first = first
        self.epoch = 0
        self._make = make

    def __call__(self) -> Any:
        """Return the dataset of the next epoch, shuffled by the seed of the epoch."""
        with random_seeds.temporary_seed(self.first + self.epoch):
            dataset = self._make()
        self.epoch += 1
        return dataset
