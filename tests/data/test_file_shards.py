"""Files are divided among workers: each once, by size, in one order for all."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.harness.tf_config import cluster_configs
from tests.harness.tiers import full
from tests.store.clusters import cluster_of, members_of, on_all
from tfdp.communication.cluster import mpi_cluster
from tfdp.communication.coordination import worker_group
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.communication.store.membership import Membership
from tfdp.ground._compat import tf_data
from tfdp.ground.plans.file_owners import balance_files, bytes_of_workers
from tfdp.training.data import file_shards
from tfdp.training.data.determinism import draws_seeds_once, nondeterminism_of
from tfdp.training.data.early_rows import batch_local_rows
from tfdp.training.data.file_shards import FileShard

NUM_FILES = 12


class Alike(WorkerGroup):
    """The group of a worker of several that all see the same."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers = rank, num_workers

    def all_gather(self, topic: str, value: Any, *limits: Any) -> list[Any]:
        return [value] * self.num_workers


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    sizes = np.random.default_rng(0).integers(50, 100, NUM_FILES)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:02}").write_bytes(b"x" * int(size))
    (tmp_path / "99-folder").mkdir()
    return tmp_path


def of_worker(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_workers: int, *given: Any, **options
) -> tf.data.Dataset:
    group = Alike(rank, num_workers)
    monkeypatch.setattr(file_shards, "_workers_sharing_files", lambda: group)
    return tfdp.data.shard_files(*given, **options)


def names(dataset: tf.data.Dataset) -> list[str]:
    return [name.decode()[-2:] for name in dataset.as_numpy_iterator()]


ALL = [f"{number:02}" for number in range(NUM_FILES)]


@pytest.mark.filterwarnings("ignore:Files do not divide evenly")
@pytest.mark.parametrize("num_workers", [full(1), full(2), full(3), 5, full(NUM_FILES)])
def test_each_epoch_has_one_order_of_which_each_worker_reads_its_part(
    folder, monkeypatch, num_workers
):
    tf.random.set_seed(num_workers)  # has no part in it
    orders = names(of_worker(monkeypatch, 0, 1, str(folder / "*"), seed=3))
    assert sorted(orders) == ALL
    whole = of_worker(monkeypatch, 0, 1, str(folder / "*"), seed=3)
    workers = [
        of_worker(monkeypatch, rank, num_workers, folder / "*", seed=3)
        for rank in range(num_workers)
    ]
    first = None
    for _ in range(3):
        order, parts = names(whole), [names(each) for each in workers]
        assert sorted(name for part in parts for name in part) == ALL
        for part in parts:
            assert part == [name for name in order if name in part]
        assert [len(part) for part in parts] == [len(each) for each in workers]
        assert order != first
        first = order


def test_the_order_is_the_same_on_any_machine(folder, monkeypatch):
    order = names(of_worker(monkeypatch, 0, 1, str(folder / "*")))
    assert order == [
        "10",
        "11",
        "03",
        "00",
        "05",
        "08",
        "07",
        "02",
        "06",
        "04",
        "01",
        "09",
    ]
    by_name = of_worker(monkeypatch, 0, 1, str(folder / "*"), seed=None)
    assert [names(by_name), names(by_name)] == [ALL, ALL]


def test_owners_have_about_as_many_bytes_and_one_file_at_least():
    rng = np.random.default_rng(1)
    for num_workers in (1, 2, 7, 64):
        sizes = rng.lognormal(10, 0.5, 40 * num_workers).astype(int).tolist()
        totals = bytes_of_workers(sizes, balance_files(sizes, num_workers), num_workers)
        assert max(totals) <= 1.02 * sum(totals) / num_workers
    assert sorted(balance_files([0, 0, 9], 3)) == [0, 1, 2]


def test_patterns_are_listed_together_and_files_read_with_their_own_sizes(
    folder, monkeypatch
):
    patterns = [str(folder / "0*"), folder / "1*"]
    assert sorted(names(of_worker(monkeypatch, 0, 1, patterns))) == ALL
    sizes = {path.name: path.stat().st_size for path in folder.glob("[01]*")}
    parts = [names(of_worker(monkeypatch, r, 2, str(folder / "*"))) for r in (0, 1)]
    totals = [sum(sizes[name] for name in part) for part in parts]
    assert max(totals) < 1.05 * min(totals)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (
            "none-*",
            r"`pattern` of `shard_files` matches no file; .* pattern='.*none-\*'",
        ),
        (
            ["0*", "*5"],
            "matches a file 2 times, '.*05'; it must match at least one file",
        ),
        ("99*", "matches no file"),
        ([], r"must be a string or a path, or a list of them. Received: pattern=\[\]"),
        (None, "Received: pattern=None"),
        ([1], r"Received: pattern=\[1\]"),
    ],
)
def test_wrong_patterns_are_refused(folder, monkeypatch, pattern, text):
    monkeypatch.chdir(folder)
    if isinstance(pattern, str):
        pattern = str(folder / pattern)
    with pytest.raises(ValueError, match=text):
        tfdp.data.shard_files(pattern)
    for seed in (True, "1", 0.5):
        with pytest.raises(ValueError, match="`seed` must be an integer or None"):
            tfdp.data.shard_files(str(folder / "*"), seed=seed)


@pytest.mark.parametrize(
    "variables",
    [{"TF_CONFIG": cluster_configs(2)[0]}, {"PMI_SIZE": "2", "PMI_RANK": "0"}],
    ids=["TF_CONFIG", "MPI"],
)
def test_a_strategy_has_to_be_there_before_its_files(folder, monkeypatch, variables):
    monkeypatch.setattr(worker_group, "_latest", {})
    monkeypatch.setattr(mpi_cluster, "has_mpi4py", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="strategy first"):
        tfdp.data.shard_files(str(folder / "*"))


def test_one_large_file_is_warned_of(folder, monkeypatch):
    (folder / "05").write_bytes(b"x" * 10_000)
    with pytest.warns(UserWarning, match="worker 0 reads 10,000 of 10,"):
        of_worker(monkeypatch, 0, 2, str(folder / "*"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_worker(monkeypatch, 1, 2, str(folder / "*"))


def rows_of_lines(files: tf.data.Dataset) -> dict[str, tf.data.Dataset]:
    def rows(name: tf.Tensor) -> tf.data.Dataset:
        number = tf.strings.to_number(tf.strings.substr(name, -2, 2), tf.int64)
        return tf.data.Dataset.range(4).map(lambda row: 4 * number + row)

    def shuffled(name: tf.Tensor) -> tf.data.Dataset:
        return rows(name).shuffle(4, seed=5)

    return {
        "interleave": files.interleave(rows, cycle_length=3),
        "in parallel": files.interleave(rows, cycle_length=3, num_parallel_calls=2),
        "flat_map": files.flat_map(rows).prefetch(1),
        "shuffled": files.interleave(rows, cycle_length=2).shuffle(7, seed=2),
        "shuffled inside": files.interleave(shuffled, cycle_length=2),
    }


@pytest.mark.parametrize("name", rows_of_lines(tf.data.Dataset.from_tensors("00")))
def test_the_order_of_an_epoch_does_not_depend_on_what_was_read_before(
    folder, monkeypatch, name
):
    """So a run that is resumed need not read the epochs before again."""

    def dataset() -> tf.data.Dataset:
        files = of_worker(monkeypatch, 1, 2, str(folder / "*"))
        return rows_of_lines(files)[name].batch(8)

    whole, resumed = dataset(), dataset()
    epochs = [[each.tolist() for each in whole.as_numpy_iterator()] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert nondeterminism_of(resumed, is_ordered=True) is None
    assert draws_seeds_once(resumed)
    for _ in range(2):
        tf_data.begin_shuffles(resumed)
    assert [each.tolist() for each in resumed.as_numpy_iterator()] == epochs[2]


def test_a_shard_is_found_wherever_it_is_in_a_pipeline(folder, monkeypatch):
    files = of_worker(monkeypatch, 1, 3, str(folder / "*"))
    rows = files.interleave(tf.data.TFRecordDataset)
    others = tf.data.Dataset.range(3).map(tf.strings.as_string)
    pipelines = [
        rows.batch(4).prefetch(1),
        tf.data.TFRecordDataset(files),
        tf.data.TFRecordDataset(files, num_parallel_reads=2),
        tf.data.TextLineDataset(files).shuffle(2),
        tf.data.FixedLengthRecordDataset(files, 4),
        tf.data.Dataset.zip((others, rows)),
        tf.data.Dataset.sample_from_datasets([others, rows]),
        others.concatenate(rows),
        others.flat_map(lambda _: files),
        others.flat_map(lambda _: rows.batch(2)).repeat(),
        others.flat_map(lambda _: others.flat_map(lambda _: rows)),
        others.interleave(lambda _: tf.data.Dataset.zip((others, rows))).batch(2),
    ]
    for number, dataset in enumerate(pipelines):
        shard = FileShard.of_dataset(dataset)
        assert shard is not None, number
        assert (shard.rank, shard.num_workers, len(shard.digest)) == (1, 3, 16)
    assert FileShard.of_dataset(others.flat_map(lambda _: others).batch(2)) is None


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1], [2, 3, 4]])
def test_own_batches_have_the_rows_of_a_replicas_part(ranks):
    rows = tf.data.Dataset.range(50)
    num_replicas = 2 * len(ranks)
    size = [len(part) for part in np.array_split(np.arange(9), num_replicas)]
    expected = sum(size[rank] for rank in ranks)
    batches = rows.batch(9).prefetch(2).take(3).repeat(2)
    own = batch_local_rows(batches, ranks, num_replicas)
    found = [each.tolist() for each in own.as_numpy_iterator()]
    once = [list(range(n * expected, (n + 1) * expected)) for n in range(3)]
    assert found == 2 * once
    full = batch_local_rows(rows.batch(9, drop_remainder=True), ranks, num_replicas)
    assert full.element_spec.shape == (expected,)
    assert int(full.cardinality()) == 50 // expected


def test_of_batches_that_a_stage_looks_into_no_others_are_made():
    rows = tf.data.Dataset.range(50)
    assert batch_local_rows(rows.batch(9).map(lambda x: x + 1), [0], 2) is None
    assert batch_local_rows(rows.batch(9).shuffle(2, seed=1), [0], 2) is None
    assert batch_local_rows(rows.map(lambda x: [x]).padded_batch(9), [0], 2) is None


def test_files_that_differ_are_counted_for_every_worker():
    def error(member: Membership) -> str:
        sizes = [1] * (members.index(member) + 1)
        files = file_shards.Listing([f"{n}" for n in range(len(sizes))], sizes)
        group = WorkerGroup(len(sizes) - 1, 3, timeout_seconds=10.0, store=member.store)
        with pytest.raises(ValueError, match="Workers see different files") as raised:
            file_shards._check_same_files(group, files, ["*"], None)
        return str(raised.value)

    with members_of(cluster_of(3)) as members:
        texts = on_all(members, error)
    assert len(set(texts)) == 1
    assert texts[0].endswith(
        "'1' has no entry on worker 0 and 1 byte on worker 1. Received: 1 file of 1 "
        "byte on worker 0, 2 files of 2 bytes on worker 1, 3 files of 3 bytes on "
        "worker 2"
    )
