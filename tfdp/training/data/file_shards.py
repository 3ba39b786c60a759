"""Files of a data set, of which each worker reads its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import count_workers
from tfdp.communication.coordination.worker_group import WorkerGroup, latest_group
from tfdp.ground import _compat, user_code
from tfdp.ground.arguments import is_integer, plain
from tfdp.ground.base.context import in_tfdp_scope
from tfdp.ground.plans.file_owners import balance_files, bytes_of_workers
from tfdp.ground.text import pluralize
from tfdp.training.data.same_datasets import on_workers
from tfdp.training.data.stages import no_autograph

_MARK = "tfdp_shard_files"
# An object store answers in tens of milliseconds.
_NUM_THREADS = 32
# The share of the busiest worker over the mean at which the others wait for long.
_UNEVEN = 1.25
# Files that are sent to the others to name one that differs.
_MOST_NAMES = 1000


@dataclasses.dataclass(frozen=True)
class FileShard:
    """The part of the files that a worker reads, as its dataset tells.

    Args:
        num_workers: Int, number of workers that the files are divided among.
        rank: Int, the worker.
        digest: String, the same for the same files, sizes and seed.
    """

    num_workers: int
    rank: int
    digest: str

    @classmethod
    def of_dataset(cls, dataset: tf.data.Dataset) -> FileShard | None:
        """Return the shard that a dataset is made of, or `None`."""
        for name in _compat.names_of_parts(dataset):
            if name.startswith(_MARK):
                num_workers, rank, digest = name[len(_MARK) + 1 :].split("_")
                return cls(int(num_workers), int(rank), digest)
        return None

    @classmethod
    def of_several(cls, dataset: tf.data.Dataset) -> FileShard | None:
        """Return the shard if several workers share the files, or `None`."""
        shard = cls.of_dataset(dataset)
        return shard if shard and shard.num_workers > 1 else None

    @property
    def name(self) -> str:
        """Name of the part of a dataset that the shard is."""
        return f"{_MARK}_{self.num_workers}_{self.rank}_{self.digest}"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Files that one worker sees.

    Args:
        names: List of strings, sorted.
        sizes: List of ints, bytes of each.
        problem: String, what is wrong with them; empty if nothing is. Defaults to
            `""`.
    """

    names: list[str]
    sizes: list[int]
    problem: str = ""

    def digest(self, seed: int | None) -> str:
        """Summarize the files, their sizes and their order, in whichever folder."""
        names = [os.path.basename(name) for name in self.names]
        return _digest([names, self.sizes, seed])

    def __str__(self) -> str:
        files = pluralize(len(self.names), "file")
        return f"{files} of {pluralize(sum(self.sizes), 'byte')}"


@_compat.filter_traceback
def shard_files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    seed: int | None = 0,
) -> tf.data.Dataset:
    r"""The names of the files that this worker reads, in another order each epoch.

    For data of which no worker can read all. Every worker calls it alike, after the
    strategy is made. Files are divided among workers so that each has about as many
    bytes, and each file is read by one worker. All go through them in one shuffled
    order, another one in each epoch and the same on any machine; each takes its own.
    In a single process all files are its own.

    Build the pipeline of one device upon it, in batches of the global size. Of its own
    rows a worker then takes as many for a step as it has of a global batch, and an
    epoch ends for all workers at the same step, when the last is through
    (`CommunicationOptions.uneven`). Leave out `shard` and `AutoShardPolicy`.

    With fewer files than workers, all workers read all files, with a warning, and each
    takes its rows of every batch.

    Args:
        pattern: String or path, or a sequence of them, as `tf.io.gfile.glob` takes
            them: `"/data/train-*.tfrecord"`, `"gs://bucket/train-*"`. Directories are
            left out.
        seed: Int, the seed of the order, or `None`: the order of the names in every
            epoch. Defaults to `0`.

    Returns:
        `tf.data.Dataset` of file names, scalar strings.

    Raises:
        ValueError: On every worker, if the pattern matches no file on some worker, or
            one file twice; if workers see different files, or give different seeds; if
            `TF_CONFIG` names several workers and there is no strategy yet; or if an
            argument has a wrong type.

    Example:

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for number in range(3):
    ...     _ = (folder / f"{number}.txt").write_text(f"{number} a\n{number} b")
    >>> files = shard_files(folder / "*.txt", seed=None)
    >>> lines = files.interleave(tf.data.TextLineDataset, cycle_length=2)
    >>> [line.decode() for line in lines.as_numpy_iterator()]
    ['0 a', '1 a', '0 b', '1 b', '2 a', '2 b']
    """
    if seed is not None and not is_integer(seed):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    seed = plain(seed)
    patterns = _patterns_of(pattern)
    worker_group = _worker_group()
    files = _list(patterns)
    _agree(worker_group, files, patterns, seed)
    num_files, num_workers = len(files.names), worker_group.num_workers
    if num_files < num_workers:
        _warn_of_few(worker_group, num_files)
        num_workers = 1
    owners = balance_files(files.sizes, num_workers)
    _warn_of_uneven_sizes(worker_group, files.sizes, owners, num_workers)
    rank = worker_group.rank if num_workers > 1 else 0
    shard = FileShard(num_workers, rank, files.digest(seed))
    return _dataset(files.names, owners, shard, seed)


def _patterns_of(pattern: Any) -> list[str]:
    is_one = isinstance(pattern, (str, os.PathLike))
    given = [pattern] if is_one else pattern
    is_right = isinstance(given, (list, tuple)) and given
    if not is_right or not all(isinstance(p, (str, os.PathLike)) for p in given):
        raise ValueError(
            "`pattern` must be a string or a path, or a list of them. "
            f"Received: pattern={pattern!r}"
        )
    return [os.fspath(each) for each in given]


def _worker_group() -> WorkerGroup:
    """Return the workers that share the files: the scope's, or the strategy's."""
    if in_tfdp_scope():
        return tf.distribute.get_strategy().extended.worker_group
    group = latest_group()
    if group is not None:
        return group
    num_workers = count_workers()
    if num_workers > 1:
        raise ValueError(
            "`shard_files` divides files among the workers of a strategy: make the "
            f"strategy first. Received: {pluralize(num_workers, 'worker')} and "
            "no strategy"
        )
    return WorkerGroup(rank=0, num_workers=1)


def _list(patterns: list[str]) -> Listing:
    """List the files that patterns match, with their sizes."""
    try:
        names = sorted(name for each in patterns for name in tf.io.gfile.glob(each))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            found = list(threads.map(tf.io.gfile.stat, names))
    except tf.errors.OpError as error:
        first_line = (error.message or "").partition("\n")[0]
        return Listing([], [], f"cannot be listed ({first_line})")
    files = [
        (name, int(each.length))
        for name, each in zip(names, found, strict=True)
        if not each.is_directory
    ]
    names, sizes = [name for name, _ in files], [size for _, size in files]
    return Listing(names, sizes, _problem_of(names))


def _problem_of(names: list[str]) -> str:
    if not names:
        return "matches no file"
    name, times = Counter(names).most_common(1)[0]
    return f"matches a file {times} times, '{name}'" if times > 1 else ""


def _agree(
    group: WorkerGroup, files: Listing, patterns: list[str], seed: int | None
) -> None:
    """Raise on all workers unless they see the same files."""
    own = [files.problem, str(files), _digest([files.names, files.sizes]), seed]
    told = group.all_gather("the files of `shard_files`", own)
    problems, counts, digests, seeds = zip(*told, strict=True)
    found = next((rank for rank, problem in enumerate(problems) if problem), None)
    if found is not None:
        where = f" on worker {found}" if group.num_workers > 1 else ""
        raise group.error(
            f"`pattern` of `shard_files` {problems[found]}{where}; it has to match "
            f"each file of the data once. Received: pattern={_shown(patterns)}",
        )
    if len(set(digests)) > 1:
        difference = _difference(group, files)
        raise group.error(
            "Workers see different files, so that some would be read twice or not at "
            f"all. `shard_files` needs the same ones on every worker. {difference}"
            f"Received: {on_workers(counts)}",
        )
    if len(set(seeds)) > 1:
        raise group.error(
            "Workers give `shard_files` different seeds, and with them different "
            f"orders. Give all the same. Received: seed={on_workers(seeds)}",
        )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _difference(group: WorkerGroup, files: Listing) -> str:
    """Name a file that one worker sees and another does not, where there are few."""
    own = list(zip(files.names, files.sizes, strict=True))[:_MOST_NAMES]
    first, *others = map(dict, group.all_gather("the names of files", own))
    for rank, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                sizes = [_size_of(each.get(name)) for each in (first, other)]
                return (
                    f"'{name}' has {sizes[0]} on worker 0 and {sizes[1]} on worker "
                    f"{rank}. "
                )
    return ""


def _size_of(num_bytes: int | None) -> str:
    return "no entry" if num_bytes is None else pluralize(num_bytes, "byte")


def _shown(patterns: list[str]) -> str:
    return repr(patterns[0] if len(patterns) == 1 else patterns)


def _warn_of_few(group: WorkerGroup, num_files: int) -> None:
    if group.is_chief:
        user_code.warn(
            f"There are {pluralize(num_files, 'file')} for "
            f"{pluralize(group.num_workers, 'worker')}: "
            "all read all of it, and each takes its rows of every batch. For data that "
            "is too large for that write at least as many files as workers."
        )


def _warn_of_uneven_sizes(
    group: WorkerGroup, sizes: list[int], owners: list[int], num_workers: int
) -> None:
    totals = bytes_of_workers(sizes, owners, num_workers)
    most = max(totals)
    if group.is_chief and most > _UNEVEN * sum(totals) / num_workers:
        user_code.warn(
            f"Files do not divide evenly: worker {totals.index(most)} reads "
            f"{most:,} of {pluralize(sum(totals), 'byte')}, and the others have no "
            "rows at the end of each epoch. Write more files, of more equal sizes. "
            f"Received: {pluralize(len(sizes), 'file')}, the largest of "
            f"{pluralize(max(sizes), 'byte')}"
        )


def _dataset(
    names: list[str], owners: list[int], shard: FileShard, seed: int | None
) -> tf.data.Dataset:
    """Make the dataset of one worker's files, in an order that is common to all."""
    dataset = tf.data.Dataset.from_tensor_slices((names, owners), name=shard.name)
    if seed is not None:
        # TensorFlow mixes its global seed into every other one.
        with _compat.temporary_seed(seed):
            dataset = dataset.shuffle(len(names), seed=seed)
    own = dataset.filter(no_autograph(lambda name, owner: owner == shard.rank))
    own = own.map(no_autograph(lambda name, owner: name))
    num_own = owners.count(shard.rank)
    return own.apply(tf.data.experimental.assert_cardinality(num_own))
