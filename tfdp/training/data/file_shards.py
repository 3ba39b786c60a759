"""Division of a data set's files among workers, so that each reads its own files."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from tfdp.communication.cluster import count_workers
from tfdp.communication.coordination.facts import SharedFact, compare, digest
from tfdp.communication.coordination.worker_group import WorkerGroup, latest_group
from tfdp.ground import user_code
from tfdp.ground._compat import patches, random_seeds, tf_data
from tfdp.ground.arguments import is_integer, plain
from tfdp.ground.base.context import in_tfdp_scope
from tfdp.ground.plans.file_owners import balance_files, bytes_of_workers
from tfdp.ground.text import pluralize
from tfdp.training.data.same_datasets import list_by_worker
from tfdp.training.data.stages import no_autograph

# A `FileShard` is stored in the name of a dataset stage, because names survive the
# stages that users append. This prefix marks such a name.
_MARK = "tfdp_shard_files"
# The number of file sizes that are requested in parallel. An object store takes tens of
# milliseconds for each answer, so requests one after another would take long.
_NUM_THREADS = 32
# If a worker reads more than 1.25 times the workers' mean of bytes, the user is warned:
# the other workers have no rows left at the end of each epoch.
_MAX_IMBALANCE = 1.25
# If the workers' lists of files differ, each worker sends no more than this many names:
# the error needs only the first difference, and a list may have millions of names.
_MAX_SENT_NAMES = 1000


@dataclasses.dataclass(frozen=True)
class FileShard:
    """One worker's part of a set of files, stored in the name of a `tf.data` stage.

    Args:
        num_workers: Int, number of workers that the files are divided among.
        rank: Int, rank of the worker among them.
        digest: String, digest of the names and sizes of all files and of the seed.
    """

    num_workers: int
    rank: int
    digest: str

    @classmethod
    def of_dataset(cls, dataset: tf.data.Dataset) -> FileShard | None:
        """Return the shard that a dataset reads, or `None` without `shard_files`."""
        for name in tf_data.names_of_stages(dataset):
            if name.startswith(_MARK):
                num_workers, rank, digest = name[len(_MARK) + 1 :].split("_")
                return cls(int(num_workers), int(rank), digest)
        return None

    @classmethod
    def of_divided_files(cls, dataset: tf.data.Dataset) -> FileShard | None:
        """Return the shard that a dataset reads, if workers read different files.

        Returns:
            `FileShard`, or `None` without `shard_files`, or if all workers read all
            files.
        """
        shard = cls.of_dataset(dataset)
        return shard if shard and shard.num_workers > 1 else None

    @property
    def name(self) -> str:
        """String, name of a dataset stage, from which `of_dataset` reads the shard."""
        return f"{_MARK}_{self.num_workers}_{self.rank}_{self.digest}"


@dataclasses.dataclass(frozen=True)
class Listing:
    """Names and sizes of the files that match the patterns on one worker.

    Args:
        names: List of strings, sorted.
        sizes: List of ints, number of bytes of each file.
        problem: String, such as `"matches no file"`, or empty if the files are usable.
            Defaults to `""`.
    """

    names: list[str]
    sizes: list[int]
    problem: str = ""

    def digest(self, seed: int | None) -> str:
        """Return a digest of the base names and sizes of the files, and of the seed."""
        names = [os.path.basename(name) for name in self.names]
        return digest([names, self.sizes, seed])[:16]

    def __str__(self) -> str:
        """Format the listing for a message, such as '3 files of 1,200 bytes'."""
        files = pluralize(len(self.names), "file")
        return f"{files} of {pluralize(sum(self.sizes), 'byte')}"


@patches.filter_traceback
def shard_files(
    pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    seed: int | None = 0,
) -> tf.data.Dataset:
    r"""Create a dataset of the names of the files that this worker reads.

    Use it for data that is too large for each worker to read all of it. Every worker
    calls it with the same arguments, after the strategy is created. Each file is read
    by one worker, and the workers have about the same number of bytes. The files are
    shuffled in a common order, which differs between epochs and is the same on any
    machine. A single process reads all files.

    Build the pipeline as for one device, in batches of the global size. For each step a
    worker takes its share of a global batch from its own files. An epoch ends for all
    workers at the same step, when the last worker has read its files
    (`CommunicationOptions.uneven`). Leave out `shard` and `AutoShardPolicy`.

    With fewer files than workers, all workers read all files, with a warning, and each
    takes its rows of every batch.

    Args:
        pattern: String or path, or a sequence of them, as `tf.io.gfile.glob` takes
            them: `"/data/train-*.tfrecord"`, `"gs://bucket/train-*"`. Directories are
            left out.
        seed: Int, seed of the shuffle, or `None` for sorted names in every epoch.
            Defaults to `0`.

    Returns:
        `tf.data.Dataset` of file names, scalar strings.

    Raises:
        ValueError: On every worker, if the pattern matches no file on some worker, or
            one file twice; if workers see different files, or pass different seeds; if
            `TF_CONFIG` names several workers and no strategy exists yet; or if an
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
    worker_group = _workers_sharing_files()
    files = _list_files(patterns)
    _check_same_files(worker_group, files, patterns, seed)
    num_files, num_workers = len(files.names), worker_group.num_workers
    if num_files < num_workers:
        _warn_of_few_files(worker_group, num_files)
        num_workers = 1
    owners = balance_files(files.sizes, num_workers)
    _warn_of_uneven_sizes(worker_group, files.sizes, owners, num_workers)
    rank = worker_group.rank if num_workers > 1 else 0
    shard = FileShard(num_workers, rank, files.digest(seed))
    return _dataset_of_shard(files.names, owners, shard, seed)


def _patterns_of(pattern: Any) -> list[str]:
    """Return the `pattern` of `shard_files`, one or several, as a list of strings.

    Raises:
        ValueError: If it is neither a string, nor a path, nor a list of them.
    """
    is_one = isinstance(pattern, (str, os.PathLike))
    patterns = [pattern] if is_one else pattern
    is_right = isinstance(patterns, (list, tuple)) and patterns
    if not is_right or not all(isinstance(p, (str, os.PathLike)) for p in patterns):
        raise ValueError(
            "`pattern` must be a string or a path, or a list of them. "
            f"Received: pattern={pattern!r}"
        )
    return [os.fspath(each) for each in patterns]


def _workers_sharing_files() -> WorkerGroup:
    """Return the worker group of the active scope, or of the latest strategy.

    Without a strategy it is a group of one worker.

    Raises:
        ValueError: If no strategy exists, and `TF_CONFIG` names several workers.
    """
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


def _list_files(patterns: list[str]) -> Listing:
    """List the files that patterns match, with their sizes, as this worker sees them.

    An error of the file system becomes the `problem` of the listing.
    """
    try:
        names = sorted(name for each in patterns for name in tf.io.gfile.glob(each))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            stats = list(threads.map(tf.io.gfile.stat, names))
    except tf.errors.OpError as error:
        first_line = (error.message or "").partition("\n")[0]
        return Listing([], [], f"cannot be listed ({first_line})")
    files = [
        (name, int(each.length))
        for name, each in zip(names, stats, strict=True)
        if not each.is_directory
    ]
    names, sizes = [name for name, _ in files], [size for _, size in files]
    return Listing(names, sizes, _find_problem(names))


def _find_problem(names: list[str]) -> str:
    """Return what is wrong with the files that patterns match.

    Args:
        names: List of strings, the matched files, one of them maybe several times.

    Returns:
        String for `Listing.problem`, such as 'matches no file'; empty for usable names.
    """
    if not names:
        return "matches no file"
    name, times = Counter(names).most_common(1)[0]
    return f"matches a file {times} times, '{name}'" if times > 1 else ""


def _check_same_files(
    group: WorkerGroup, files: Listing, patterns: list[str], seed: int | None
) -> None:
    """Raise on all workers unless they see the same files.

    Args:
        group: `WorkerGroup` of all workers.
        files: `Listing` of this worker.
        patterns: List of strings, for the message.
        seed: Int or `None`, the argument of `shard_files`.

    Raises:
        ValueError: If files or seeds differ, or if a worker has a problem.
    """
    texts: list[str] = []

    def check(gathered: Sequence[list[str]]) -> None:
        """Store all listings' texts; raise a `ValueError` if a worker has a problem.

        `gathered` has a list of two strings for each worker: the problem of its
        `Listing`, `""` for none, and the text of the `Listing`.
        """
        problems = [problem for problem, _ in gathered]
        texts.extend(text for _, text in gathered)
        worker = next((rank for rank, each in enumerate(problems) if each), None)
        if worker is not None:
            where = f" on worker {worker}" if group.num_workers > 1 else ""
            raise ValueError(
                f"`pattern` of `shard_files` {problems[worker]}{where}; it must match "
                "at least one file, and no file twice. Received: "
                f"pattern={(patterns[0] if len(patterns) == 1 else patterns)!r}",
            )

    entries = list(zip(files.names, files.sizes, strict=True))
    facts = [
        SharedFact(
            "names",
            entries,
            lambda seen: _explain_files(seen, texts),
            lambda: entries[:_MAX_SENT_NAMES],
        ),
        SharedFact(
            "seed",
            seed,
            lambda seeds: (
                "Workers give `shard_files` different seeds, so that their orders "
                "differ. Give every worker the same seed. Received: "
                f"seed={list_by_worker(seeds.values())}"
            ),
        ),
    ]
    extra = [files.problem, str(files)]
    compare(group, "the files of `shard_files`", facts, extra, before=check)


def _explain_files(seen: dict[int, list], texts: Sequence[str]) -> str:
    """Return the text of the error that two workers see different files.

    The text names a file that differs, if it is among the first of a long list.

    Args:
        seen: Dict from the ranks of two workers to the list of their files, pairs of a
            name and a size in bytes.
        texts: Sequence of the text of each worker's `Listing`.
    """
    rank = max(seen)
    first, other = dict(seen[0]), dict(seen[rank])
    names = sorted(first.keys() | other.keys())
    differing = (
        f"{name!r} has {_describe_size(first.get(name))} on worker 0 and "
        f"{_describe_size(other.get(name))} on worker {rank}. "
        for name in names
        if first.get(name) != other.get(name)
    )
    return (
        "Workers see different files, so that some would be read twice or not at all. "
        f"`shard_files` needs the same ones on every worker. {next(differing, '')}"
        f"Received: {list_by_worker(texts)}"
    )


def _describe_size(num_bytes: int | None) -> str:
    """Format a size such as '8 bytes'; 'no entry' for `None`, a missing file."""
    return "no entry" if num_bytes is None else pluralize(num_bytes, "byte")


def _warn_of_few_files(group: WorkerGroup, num_files: int) -> None:
    """Warn that fewer files than workers exist, so that all workers read all files."""
    if group.is_chief:
        user_code.warn(
            f"`shard_files` found {pluralize(num_files, 'file')} for "
            f"{pluralize(group.num_workers, 'worker')}: all workers read all files, "
            "and each takes its rows of every batch. If the data is too large for "
            "that, write at least one file per worker."
        )


def _warn_of_uneven_sizes(
    group: WorkerGroup, sizes: list[int], owners: list[int], num_workers: int
) -> None:
    """Warn if one worker reads over 1.25 times the mean number of bytes per worker.

    Args:
        group: `WorkerGroup` of all workers. Only worker 0 warns.
        sizes: List of ints, number of bytes of each file.
        owners: List of ints, rank of the worker that reads each file.
        num_workers: Int, number of workers.
    """
    totals = bytes_of_workers(sizes, owners, num_workers)
    most = max(totals)
    if group.is_chief and most > _MAX_IMBALANCE * sum(totals) / num_workers:
        user_code.warn(
            f"Files do not divide evenly: worker {totals.index(most)} reads "
            f"{most:,} of {pluralize(sum(totals), 'byte')}, and the others have no "
            "rows at the end of each epoch. Write more files, of more equal sizes. "
            f"Received: {pluralize(len(sizes), 'file')}, the largest of "
            f"{pluralize(max(sizes), 'byte')}"
        )


def _dataset_of_shard(
    names: list[str], owners: list[int], shard: FileShard, seed: int | None
) -> tf.data.Dataset:
    """Create the dataset of one worker's file names, in the order common to all.

    Args:
        names: List of strings, names of all files.
        owners: List of ints, rank of the worker that reads each file.
        shard: `FileShard` of this worker.
        seed: Int, seed of the shuffle, or `None` for the order of `names`.
    """
    dataset = tf.data.Dataset.from_tensor_slices((names, owners), name=shard.name)
    if seed is not None:
        # TensorFlow combines `seed` with the global seed, which users may set
        # differently on each worker. So the global seed is replaced for the shuffle.
        with random_seeds.temporary_seed(seed):
            dataset = dataset.shuffle(len(names), seed=seed)
    own_names = dataset.filter(no_autograph(lambda name, owner: owner == shard.rank))
    own_names = own_names.map(no_autograph(lambda name, owner: name))
    num_own = owners.count(shard.rank)
    return own_names.apply(tf.data.experimental.assert_cardinality(num_own))
