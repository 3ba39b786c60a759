"""Checkpoints move between any number of workers, or fail whole and say why."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.checkpoint.forged import planned
from tests.harness import forks
from tests.harness.commands import run_python
from tests.harness.forks import run_script
from tests.harness.tf_config import cluster_configs
from tests.harness.tiers import full
from tfdp import checkpoint
from tfdp.checkpoint import api, files, storage
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint import writer as writing
from tfdp.checkpoint.index import Extent, Shard, TensorMetadata, check_complete
from tfdp.checkpoint.index_file import INDEX_FILE, load_index, to_text
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.storage import Storage
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.launch.cli import main
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

COUNTS = (1, 2, 3, 4, 8)
DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "float8_e4m3fn", "float8_e5m2"),
)
WAITING_SECONDS = 60
DEADLINE_SECONDS = 120


class ThreadGroup(WorkerGroup):
    """The workers of a test are threads."""

    timeout_seconds = None

    def __init__(self, rank: int, barrier: threading.Barrier, values: list) -> None:
        self.rank = rank
        self.num_workers = len(values)
        self._barrier = barrier
        self._values = values

    def all_gather(
        self, topic: str, value: Any = "", timeout_seconds: Any = None
    ) -> list:
        del topic, timeout_seconds
        self._values[self.rank] = value
        self._barrier.wait(WAITING_SECONDS)
        found = list(self._values)
        self._barrier.wait(WAITING_SECONDS)
        return found


def on_workers(action: Callable[..., Any], *per_worker: Sequence) -> list:
    """What an action returned on each worker, or the error that it raised there."""
    count = len(per_worker[0])
    barrier, texts = threading.Barrier(count), [""] * count

    def run(rank: int, *arguments: Any) -> Any:
        try:
            return action(*arguments, ThreadGroup(rank, barrier, texts))
        except Exception as error:  # noqa: BLE001 the test looks at it
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count), *per_worker))


@dataclasses.dataclass
class Worker:
    """A worker's tensors, as arrays that it holds whole or has a slice of."""

    state: list[StateTensor]
    buffers: list[tuple[str, int, np.ndarray]]  # name, first element, elements


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors of a model: of every rank, and one that is empty."""
    draw = np.random.default_rng(seed)
    return {
        "dense/kernel": draw.normal(size=(7, 11)).astype("float32"),
        "dense/bias": draw.normal(size=(11,)).astype("float16"),
        "adam/dense/kernel/momentum": draw.normal(size=(7, 11)).astype("float64"),
        "iterations": np.asarray(draw.integers(1000), "int64"),
        "seed": draw.integers(2**32, size=(2,), dtype="uint32"),
        "nothing": np.zeros((0, 3), "float32"),
        "big": draw.normal(size=(400,)).astype("float32"),
    }


def make_workers(
    tensors: dict[str, np.ndarray], count: int, *, is_filled: bool, seed: int = 1
) -> list[Worker]:
    """Workers with the tensors, every second one whole and the others in slices.

    The places at which slices begin are drawn; some slices are empty. A tensor that
    all hold whole is written in slices too, but for the first, which one writes.
    """
    draw = np.random.default_rng(seed)
    workers = [Worker([], []) for _ in range(count)]
    for number, (name, tensor) in enumerate(tensors.items()):
        flat = tensor.reshape(-1)
        cuts = np.sort(draw.integers(0, flat.size + 1, count - 1))
        bounds = [0, *map(int, cuts), flat.size]
        if number == 0:
            bounds = [0, *[flat.size] * count]
        for rank, worker in enumerate(workers):
            own = (bounds[rank], bounds[rank + 1])
            held = own if number % 2 else (0, flat.size)
            buffer = np.zeros_like(flat[held[0] : held[1]])
            if is_filled:
                buffer[:] = flat[held[0] : held[1]]
            owned = _local_shard(buffer, held[0], *own)
            shards = (_local_shard(buffer, held[0], *held),)
            worker.buffers.append((name, held[0], buffer))
            worker.state.append(
                StateTensor(name, tensor.shape, _dtype(tensor), (owned,), shards)
            )
    return workers


def _local_shard(buffer: np.ndarray, first: int, start: int, stop: int) -> LocalShard:
    view = buffer[start - first : stop - first]

    def write(elements: np.ndarray) -> None:
        assert elements.dtype == view.dtype
        view[:] = elements

    return LocalShard(start, stop, lambda: view, write)


def _dtype(tensor: np.ndarray) -> str:
    return tf.as_dtype(tensor.dtype).name


def save(
    tensors: dict[str, np.ndarray], directory: pathlib.Path, count: int = 2
) -> list:
    workers = make_workers(tensors, count, is_filled=True)
    states = [worker.state for worker in workers]
    return on_workers(api.save_state, states, [directory] * count)


def restore(
    tensors: dict[str, np.ndarray], directory: pathlib.Path, count: int = 2
) -> tuple[list, list[Worker]]:
    """What each worker returned or raised, and the workers."""
    workers = make_workers(tensors, count, is_filled=False, seed=count)
    plans = [planned(worker.state) for worker in workers]
    replies = on_workers(api.restore_state, plans, [directory] * count)
    return replies, workers


def holds(
    tensors: dict[str, np.ndarray], directory: pathlib.Path, count: int = 2
) -> bool:
    """Whether a checkpoint has exactly these tensors, on some workers."""
    replies, workers = restore(tensors, directory, count)
    assert replies == [None] * count
    return all(
        buffer.tobytes() == tensors[name].reshape(-1)[first:][: buffer.size].tobytes()
        for worker in workers
        for name, first, buffer in worker.buffers
    )


def check_nothing_loaded(workers: list[Worker]) -> None:
    for worker in workers:
        for name, _, buffer in worker.buffers:
            assert not buffer.any(), name


def folders(directory: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


@pytest.fixture
def small_parts(monkeypatch) -> None:
    """Parts of a few hundred bytes, so that a small model has many."""
    monkeypatch.setattr(files, "SHARD_BYTES", 300)


@pytest.mark.parametrize("saved_by", COUNTS)
def test_what_some_workers_save_any_number_restores(tmp_path, small_parts, saved_by):
    tensors = values()
    assert save(tensors, tmp_path, saved_by) == [None] * saved_by
    for restored_on in COUNTS:
        assert holds(tensors, tmp_path, restored_on), restored_on


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives_in_slices(tmp_path, small_parts, dtype):
    kind = tf.as_dtype(dtype).as_numpy_dtype
    draw = np.random.default_rng(3)
    tensors = {
        "whole": draw.integers(0, 2, 50).astype(kind),
        "sliced": (draw.normal(size=(30, 20)) > 0).astype(kind),
        "scalar": np.ones((), kind),
    }
    save(tensors, tmp_path, 4)
    assert holds(tensors, tmp_path, 3)


def test_a_float_survives_bit_by_bit(tmp_path):
    tensors = {"x": np.asarray([np.nan, -0.0, np.inf, -np.inf, 5e-324, 1e308])}
    save(tensors, tmp_path, 2)
    assert holds(tensors, tmp_path, 3)


def test_each_worker_writes_only_what_it_owns_in_parts_of_limited_size(
    tmp_path, small_parts
):
    tensors = values()
    workers = make_workers(tensors, 3, is_filled=True)
    states = [worker.state for worker in workers]
    on_workers(api.save_state, states, [tmp_path] * 3)
    index = load_index(str(tmp_path))
    for rank, state in enumerate(states):
        own = [part for part in index.shards if part.worker == rank]
        written = sorted(extent for part in own for extent in part.extents)
        sizes = [
            sum(e.stop - e.start for e in written if e.tensor == n) for n in range(7)
        ]
        assert sizes == [
            t.owned_shards[0].stop - t.owned_shards[0].start for t in state
        ]
    for part in index.shards:
        data = next(file for file in part.files if ".data" in file.name)
        assert data.num_bytes <= files.SHARD_BYTES


def test_a_worker_reads_only_the_files_that_it_needs(tmp_path, small_parts):
    tensors = {"a": np.arange(500.0), "b": np.arange(500.0)}
    save(tensors, tmp_path, 4)
    index = load_index(str(tmp_path))
    elements = np.zeros(30)
    state = [
        StateTensor("a", (500,), "float64", (), (_local_shard(elements, 90, 90, 120),)),
        StateTensor("b", (500,), "float64", (), ()),
    ]
    needed = {part.prefix for part in reading.needed_shards(state, index)}
    assert 0 < len(needed) < len(index.shards) / 4
    for path in folders(tmp_path)[0].iterdir():
        if path.name.split(".")[0] not in needed:
            path.unlink()
    assert on_workers(api.restore_state, [planned(state)], [tmp_path]) == [None]
    assert elements.tolist() == list(range(90, 120))


def bytes_read() -> int:
    """What all threads of this process have read of files."""
    lines = pathlib.Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux's /proc")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_restore_reads_each_byte_that_a_worker_needs_once(tmp_path, count):
    """Every second tensor is whole on all workers, the others are in slices."""
    tensors = {name: np.arange(5e5) + n for n, name in enumerate("abcde")}
    save(tensors, tmp_path, 2)
    before = bytes_read()
    replies, workers = restore(tensors, tmp_path, count)
    read = bytes_read() - before
    assert replies == [None] * count
    index = load_index(str(tmp_path))
    needed = sum(
        file.num_bytes
        for worker in workers
        for shard in reading.needed_shards(worker.state, index)
        for file in shard.files
    )
    assert needed >= sum(tensor.nbytes for tensor in tensors.values())
    assert needed <= read <= needed + 100_000  # with the index and counters of memory


@pytest.mark.parametrize("room", [0, 2000])
def test_where_memory_is_short_tensors_are_restored_some_at_a_time(
    tmp_path, small_parts, monkeypatch, room
):
    monkeypatch.setattr(api, "memory_budget", lambda group: room)
    save(values(), tmp_path, 3)
    for count in (1, 2, 4):
        assert holds(values(), tmp_path, count)


def test_a_file_that_changes_before_its_tensors_are_assigned_is_named(
    tmp_path, small_parts, monkeypatch
):
    monkeypatch.setattr(api, "memory_budget", lambda group: 0)
    save(values(), tmp_path, 1)
    assign = reading.assign_values

    def damage_first(load_plan: LoadPlan) -> None:
        _flip(sorted(folders(tmp_path)[0].glob("*.data*"))[-1])
        assign(load_plan)

    monkeypatch.setattr(reading, "assign_values", damage_first)
    (reply,), _ = restore(values(), tmp_path, 1)
    assert isinstance(reply, ValueError)
    assert "was altered: its checksum does not match. Some variables may" in str(reply)


def test_several_local_replicas_may_hold_the_same_elements(tmp_path, small_parts):
    tensors = {"a": np.arange(200.0)}
    save(tensors, tmp_path, 2)
    first, second = np.zeros(200), np.zeros(150)
    held = (_local_shard(first, 0, 0, 200), _local_shard(second, 50, 50, 200))
    state = [StateTensor("a", (200,), "float64", (), held)]
    assert on_workers(api.restore_state, [planned(state)], [tmp_path]) == [None]
    assert first.tolist() == list(range(200))
    assert second.tolist() == list(range(50, 200))


def test_a_part_has_the_bytes_of_its_elements_and_nothing_else(tmp_path):
    save({"a/b": np.arange(6.0).reshape(2, 3), "c": np.ones(2)}, tmp_path, 1)
    (path,) = folders(tmp_path)[0].iterdir()
    assert np.fromfile(path).tolist() == [*range(6), 1, 1]


def test_a_disk_that_reads_no_memory_by_itself_is_written_through_the_cache(
    tmp_path, monkeypatch
):
    """Most file systems in memory refuse it, and some refuse single writes."""
    monkeypatch.setattr(os, "write", full_disk := mock.Mock(side_effect=FULL))
    save(values(0), tmp_path)
    assert full_disk.called == hasattr(os, "O_DIRECT")
    monkeypatch.setattr(os, "write", lambda number, content: len(content) - 1)
    save(values(1), tmp_path)
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    save(values(2), tmp_path)
    assert holds(values(2), tmp_path)


def test_nobody_else_can_look_into_a_new_checkpoint(tmp_path):
    save(values(), tmp_path / "new")
    for path in (tmp_path / "new", *(tmp_path / "new").glob("data-*")):
        assert path.stat().st_mode & 0o777 == 0o700


def test_a_second_save_replaces_the_first_and_leaves_no_other_folder(tmp_path):
    (tmp_path / "data-mine").mkdir()  # not one of ours
    (tmp_path / "data-0123456789ab").mkdir()  # of a save that was killed
    for seed in (0, 1):
        save(values(seed), tmp_path)
    assert holds(values(1), tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([load_index(str(tmp_path)).token, "data-mine", INDEX_FILE])
    assert not list(tmp_path.rglob("*.json"))[1:]


class Killed(BaseException):
    """What a killed process does: nothing more."""


OPERATIONS = (
    *((writing, "write_aligned"), (os, "fsync"), (storage, "write_text")),
    *((storage, "sync_folder"), (os, "replace"), (os, "unlink")),
    (shutil, "rmtree"),
)


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "is_after"),
    # Killed after one operation is killed before the next.
    [(Killed(), False), full(FULL, False), full(FULL, True), full(Killed(), True)],
)
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch, error, is_after
):
    """Cut off before or after each operation on the disk, the first to the last."""
    monkeypatch.setattr(files, "SHARD_BYTES", 1500)
    old, new = values(0), values(1)
    (new_state,) = (w.state for w in make_workers(new, 1, is_filled=True))
    save(old, tmp_path / "old", 3)
    for number in itertools.count():
        directory = shutil.copytree(tmp_path / "old", tmp_path / str(number))
        with monkeypatch.context() as patch:
            calls = itertools.count()
            for owner, name in OPERATIONS:
                _end_at(patch, owner, name, calls, number, error, is_after)
            with contextlib.suppress(Killed, OSError):
                api.save_state(new_state, directory, WorkerGroup(0, 1))
            total = next(calls)
        is_new = holds(new, directory, 1)
        assert is_new or holds(old, directory, 1)
        assert save(old, directory, 1) == [None]
        assert holds(old, directory, 1)
        assert len(folders(directory)) == 1
        if total <= number:  # nothing was in its way
            assert is_new
            break
    assert number > 15


def _end_at(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    calls: itertools.count,
    number: int,
    error: BaseException,
    is_after: bool,
) -> None:
    original = getattr(owner, name)

    def operation(*args: Any, **options: Any) -> Any:
        is_last = next(calls) == number
        if is_last and not is_after:
            raise error
        result = original(*args, **options)
        if is_last:
            raise error
        return result

    patch.setattr(owner, name, operation)


def test_when_one_worker_fails_all_say_so_and_the_previous_one_stays(
    tmp_path, small_parts, monkeypatch
):
    save(values(0), tmp_path)
    write_shards = writing.write_shards

    def fails_on_the_second(
        state: Any, folder: Storage, worker: int, *arguments: Any
    ) -> list[Shard]:
        if worker == 1:
            raise OSError(28, "No space left on device", f"{folder.path}/worker-1-0")
        return write_shards(state, folder, worker, *arguments)

    monkeypatch.setattr(writing, "write_shards", fails_on_the_second)
    replies = save(values(1), tmp_path, 3)
    monkeypatch.undo()
    assert [type(reply) for reply in replies] == [OSError] * 3
    assert len({str(reply) for reply in replies}) == 1
    for words in (
        "worker 1: [Errno 28] No space left on device",
        "The save has not changed the previous contents of the directory",
        f"Received: directory={str(tmp_path)!r}",
    ):
        assert words in str(replies[0])
    assert len(folders(tmp_path)) == 1
    assert holds(values(0), tmp_path)


def test_a_failed_save_is_kept_where_it_may_have_succeeded(tmp_path, monkeypatch):
    def fails(directory: str) -> None:
        raise OSError(5, "Input/output error")

    save(values(), tmp_path, 1)
    token = load_index(str(tmp_path)).token
    with monkeypatch.context() as patch:
        patch.setattr(writing, "load_index", fails)
        writing.discard_save(Storage(str(tmp_path)), token)
    assert holds(values(), tmp_path, 1)


FULL_DISK = """
import resource, signal, sys
import numpy as np, tensorflow as tf
from tfdp.checkpoint import api
from tfdp.checkpoint.reader import LoadPlan
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor
directory = sys.argv[1]
def state(value):
    elements = np.full(10**5, value, "float32")
    def write(values): elements[:] = values
    piece = LocalShard(0, elements.size, lambda: elements, write)
    return [StateTensor("x", elements.shape, "float32", (piece,), (piece,))], elements
alone = WorkerGroup(0, 1)
api.save_state(state(1)[0], directory, alone)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
try:
    api.save_state(state(2)[0], directory, alone)
except OSError as error:
    print("ERROR", error)
tensors, elements = state(0)
api.restore_state(lambda index: LoadPlan(tensors), directory, alone)
print("RESTORED", set(elements.tolist()))
"""


@pytest.mark.full
@pytest.mark.processes
def test_a_disk_that_takes_no_more_is_said_and_the_previous_one_stays(tmp_path):
    done = run_script(FULL_DISK, tmp_path, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.errors
    assert "ERROR The checkpoint was not saved: " in done.output, done.output
    assert "File too large" in done.output
    assert "{{" not in done.output
    assert "RESTORED {1.0}" in done.output
    assert len(folders(tmp_path)) == 1


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), " bytes inst"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes instead of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), " bytes inst"),
    "altered": (lambda path: _flip(path), "was altered: its checksum does not match"),
}


def _flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_loaded_anywhere(
    tmp_path, monkeypatch, damage
):
    monkeypatch.setattr(files, "SHARD_BYTES", 600)
    tensors = values()
    save(tensors, tmp_path, 2)
    (folder,) = folders(tmp_path)
    harm, words = DAMAGES[damage]
    names = sorted(os.listdir(folder))
    assert {"worker-0-1.data", "worker-1-1.data"} <= set(names)
    for name in names:
        content = (folder / name).read_bytes()
        harm(folder / name)
        replies, workers = restore(tensors, tmp_path, 3)
        assert {type(reply) for reply in replies} == {ValueError}
        assert len({str(reply) for reply in replies}) == 1
        assert f"{name}'" in str(replies[0])
        writer = name.split("-")[1]
        assert f"which worker {writer} wrote, " in str(replies[0])
        assert words in str(replies[0])
        check_nothing_loaded(workers)
        (folder / name).write_bytes(content)
    assert holds(tensors, tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_named_and_nothing_is_loaded(tmp_path, damage):
    tensors = values()
    save(tensors, tmp_path)
    DAMAGES[damage][0](tmp_path / INDEX_FILE)
    replies, workers = restore(tensors, tmp_path)
    assert {type(reply) for reply in replies} == {ValueError}
    assert INDEX_FILE in str(replies[0])
    words = "There is no checkpoint in" if damage == "missing" else "is damaged"
    assert words in str(replies[0])
    check_nothing_loaded(workers)


def test_every_bit_of_an_index_counts(tmp_path):
    save({"x": np.zeros(2)}, tmp_path, 1)
    path = tmp_path / INDEX_FILE
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ 4]) + content[place:][1:]
        )
        with pytest.raises(ValueError, match="damaged"):
            load_index(str(tmp_path))


def test_a_directory_without_one_workers_files_names_one(tmp_path):
    save(values(), tmp_path, 3)
    for path in folders(tmp_path)[0].glob("worker-2-*"):
        path.unlink()
    replies, workers = restore(values(), tmp_path)
    assert "worker-2-0" in str(replies[0])
    assert "which worker 2 wrote, is missing" in str(replies[0])
    check_nothing_loaded(workers)


def _without(name: str) -> dict[str, np.ndarray]:
    return {key: value for key, value in values().items() if key != name}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            _without("seed"),
            "'seed' is in the checkpoint and not in the model",
        ),
        (
            {**values(), "more": np.zeros(2)},
            "'more' is in the model and not in the checkpoint",
        ),
        (
            {**values(), "dense/kernel": np.zeros((11, 7), "float32")},
            "'dense/kernel' has shape (7, 11) in the checkpoint and (11, 7) in the",
        ),
        (
            {**values(), "dense/bias": np.zeros((11,), "float32")},
            "'dense/bias' has dtype float16 in the checkpoint and float32 in the model",
        ),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_difference(
    tmp_path, model, words
):
    save(values(), tmp_path)
    replies, workers = restore(model, tmp_path)
    assert {type(reply) for reply in replies} == {ValueError}
    assert f"it belongs to another model. {words}" in str(replies[0])
    check_nothing_loaded(workers)


def test_workers_with_different_models_do_not_save(tmp_path):
    states = [
        make_workers(tensors, 2, is_filled=True)[rank].state
        for rank, tensors in enumerate((values(), _without("seed")))
    ]
    replies = on_workers(api.save_state, states, [tmp_path] * 2)
    assert {type(reply) for reply in replies} == {ValueError}
    assert "worker 0 saves 'seed'" in str(replies[0])
    assert not list(tmp_path.iterdir())


def test_workers_that_share_no_directory_are_told_to(tmp_path):
    states = [w.state for w in make_workers(values(), 2, is_filled=True)]
    places = [tmp_path / "first", tmp_path / "second"]
    replies = on_workers(api.save_state, states, places)
    assert {type(reply) for reply in replies} == {ValueError}
    assert "worker 1: the folder that worker 0 created is not" in str(replies[0])
    assert folders(places[0]) == []


def test_a_folder_that_another_job_has_removed_is_named(tmp_path, monkeypatch):
    def removes(storage: Storage, token: str, text: str) -> None:
        shutil.rmtree(tmp_path)
        storage.replace_text(INDEX_FILE, text, token)

    monkeypatch.setattr(writing, "replace_index", removes)
    (reply,) = save(values(), tmp_path, 1)
    assert "No such file" in str(reply)
    assert "does another job use this directory?). The save has" in str(reply)


def test_workers_that_find_different_checkpoints_load_none(tmp_path):
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        save(values(), place)
    workers = make_workers(values(), 2, is_filled=False)
    plans = [planned(worker.state) for worker in workers]
    replies = on_workers(api.restore_state, plans, places)
    assert "The workers found different checkpoints." in str(replies[1])
    check_nothing_loaded(workers)


def test_a_place_that_can_hold_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place, words in (
        (tmp_path / "file", "there is a file of that name"),
        ("s3:/bucket/folder", "a URL has two slashes"),
        ("", "or a URL. Received: directory=''"),
        (b"bytes", "Received: directory=b'bytes'"),
        (None, "Received: directory=None"),
    ):
        (reply,) = save({"x": np.zeros(2)}, place, 1)
        assert isinstance(reply, ValueError)
        assert words in str(reply)
        (reply,), _ = restore({"x": np.zeros(2)}, place, 1)
        assert isinstance(reply, ValueError)
    assert (tmp_path / "file").read_text() == "mine"
    (reply,), _ = restore({"x": np.zeros(2)}, tmp_path / "none", 1)
    assert f"There is no checkpoint in {str(tmp_path / 'none')!r}" in str(reply)


def test_an_index_of_a_later_format_is_refused(tmp_path):
    save({"x": np.zeros(2)}, tmp_path, 1)
    body = json.loads((tmp_path / INDEX_FILE).read_text())
    (tmp_path / INDEX_FILE).write_text(json.dumps({**body, "format": 3}))
    with pytest.raises(
        ValueError, match="it has format 3, and this tfdp reads up to 2"
    ):
        load_index(str(tmp_path))


@pytest.mark.parametrize(
    ("extents", "words"),
    [
        ([(0, 0, 4), (0, 5, 9)], "missing, at 4"),
        ([(0, 0, 4), (0, 3, 9)], "duplicated, at 4"),
        ([(0, 0, 4)], "missing, at 4"),
        ([(0, 0, 10)], "too many, at 10"),
        ([], "missing, at 0"),
    ],
)
def test_slices_that_do_not_make_up_a_tensor_are_no_checkpoint(extents, words):
    parts = [Shard("p", 0, (), tuple(Extent(*extent) for extent in extents))]
    with pytest.raises(ValueError, match=f"Elements of 'x' are {words}"):
        check_complete([TensorMetadata("x", (3, 3), "float32")], parts)


def convert_in_process(capsys, *arguments: object) -> tuple[int, str]:
    """For what is answered before TensorFlow is needed."""
    with pytest.raises(SystemExit) as stopped:
        main.main(["convert", *map(str, arguments)])
    return stopped.value.code, capsys.readouterr().err


def test_convert_answers_wrong_arguments_in_one_sentence(tmp_path, capsys):
    save({"x": np.zeros(2)}, tmp_path / "plain", 1)
    for step in (8, 12):
        save({"x": np.zeros(2)}, tmp_path / "backups" / f"step-{step}", 1)
    (tmp_path / "backups" / "step-16.damaged").mkdir()
    (tmp_path / "there.keras").write_text("mine")
    (tmp_path / "folder.keras").mkdir()
    for arguments, words in (
        (("plain", "m.h5"), "must end in .keras. Received: "),
        (("plain", "no/m.keras"), "The folder of the file does not exist"),
        (("plain", "folder.keras"), "The name is that of a directory"),
        (("plain", "there.keras"), "give --force to replace it. Received: "),
        (("none", "m.keras"), "There is no checkpoint in"),
        ((".", "m.keras"), "Give the checkpoint in it: "),
        (("backups", "m.keras"), "/backups/step-12'."),
        (("there.keras", "m.keras"), "DIR is a file; give the directory that"),
        (("plain", "m.keras"), "call `tfdp.checkpoint.restore` and `model.save`"),
    ):
        paths = [tmp_path / argument for argument in arguments]
        code, message = convert_in_process(capsys, *paths)
        assert code == 2
        assert message.startswith("tfdp: error: ")
        assert message.count("\n") == 1
        assert words in message
    assert (tmp_path / "there.keras").read_text() == "mine"


CONVERT = """
import sys, zipfile
import keras, numpy as np
from tfdp import checkpoint
from tfdp.launch.cli.main import main
directory, output, kind = sys.argv[1:]
def run(*arguments):
    try:
        main(["convert", directory, output, *arguments])
    except SystemExit as stopped:
        return stopped.code or 0
class Own(keras.layers.Dense):
    pass
if kind == "adapted":
    lookup = keras.layers.StringLookup()
    lookup.adapt(["a", "b"])
    model = keras.Sequential([keras.Input((3,), dtype="string"), lookup])
    checkpoint.save(model, directory)
    print("CODE", run())
    raise SystemExit
keras.utils.set_random_seed(0)
dense = (Own if kind == "own" else keras.layers.Dense)(4, activation="relu")
layers = [dense, keras.layers.BatchNormalization(), keras.layers.Dense(1)]
if kind == "functional":
    inputs = outputs = keras.Input((3,))
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
else:
    model = keras.Sequential([keras.Input((3,)), *layers])
optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
y = x.sum(axis=1, keepdims=True)
model.fit(x, y, epochs=2, verbose=0)
checkpoint.save(model, directory)
if kind == "own":
    keras.saving.get_custom_objects().clear()
    print("CODE", run())
    raise SystemExit
assert run() == 0 and run() == 2 and run("--force") == 0
loaded = keras.saving.load_model(output)
assert type(loaded.optimizer) is keras.optimizers.AdamW
pairs = zip(
    [*model.variables, *model.optimizer.variables],
    [*loaded.variables, *loaded.optimizer.variables],
    strict=True,
)
for own, other in pairs:
    assert own.shape == other.shape and np.array_equal(own, other), own.path
for each in (model, loaded):
    keras.utils.set_random_seed(1)
    each.fit(x, y, epochs=1, verbose=0, shuffle=False)
for own, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
    assert np.array_equal(own, other)
print("CODE 0")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    ["functional", full("sequential")],
)
def test_convert_writes_the_file_that_keras_trains_on_with(tmp_path, kind):
    paths = (str(tmp_path / "checkpoint"), str(tmp_path / "model.keras"))
    done = run_script(CONVERT, *paths, kind, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.errors
    assert "CODE 0" in done.output
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "model.keras"]


@pytest.mark.full
@pytest.mark.processes
def test_convert_knows_the_optimizer_of_tfdp(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfdp.optimizers.LARS(0.1), "mse")
    checkpoint.save(model, tmp_path / "checkpoint")
    paths = (str(tmp_path / "checkpoint"), str(tmp_path / "model.keras"))
    command = ("-m", "tfdp", "convert", *paths)
    done = run_python(*command, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.output
    loaded = keras.saving.load_model(paths[1])
    assert type(loaded.optimizer) is tfdp.optimizers.LARS


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("own", "Could not locate class 'Own'"),
        full("adapted", "'string_lookup' lacks its vocabulary, from `adapt`"),
    ],
)
def test_convert_cannot_build_what_only_the_script_has(tmp_path, kind, why):
    paths = (str(tmp_path / "checkpoint"), str(tmp_path / "model.keras"))
    done = run_script(CONVERT, *paths, kind, deadline_seconds=DEADLINE_SECONDS)
    assert "CODE 2" in done.output, done.errors
    assert f"The model cannot be built without its script ({why})" in done.errors
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_an_index_says_what_it_was_written_with(tmp_path):
    save({"x": np.zeros(2)}, tmp_path, 1)
    index = load_index(str(tmp_path))
    assert index.versions["tensorflow"] == tf.__version__
    assert (tmp_path / INDEX_FILE).read_text() == to_text(index)


def without_crc32c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)


def test_checksums_are_of_crc32c_where_its_package_is_and_else_of_crc32(
    tmp_path, monkeypatch
):
    pytest.importorskip("google_crc32c")
    save(values(), tmp_path)
    assert load_index(str(tmp_path)).algorithm == "crc32c"
    assert holds(values(), tmp_path)
    without_crc32c(monkeypatch)
    save(values(), tmp_path)
    assert load_index(str(tmp_path)).algorithm == "crc32"
    assert holds(values(), tmp_path)


def test_where_one_worker_lacks_the_package_of_crc32c_all_files_have_crc32(
    tmp_path, monkeypatch
):
    installed = iter(["crc32c", "crc32"])
    monkeypatch.setattr(files, "best_algorithm", lambda: next(installed))
    save(values(), tmp_path)
    assert load_index(str(tmp_path)).algorithm == "crc32"
    without_crc32c(monkeypatch)
    assert holds(values(), tmp_path)


def test_a_checkpoint_with_crc32c_names_the_package_that_reads_it(
    tmp_path, monkeypatch
):
    pytest.importorskip("google_crc32c")
    save(values(), tmp_path)
    without_crc32c(monkeypatch)
    replies, workers = restore(values(), tmp_path)
    for reply in replies:
        assert isinstance(reply, ValueError)
        assert "`pip install google-crc32c`" in str(reply)
    check_nothing_loaded(workers)


def take_part(
    directory: str, elsewhere: str, *, is_saved: bool, use_strategy: bool
) -> tuple[list[np.ndarray], str, str]:
    """In a process of its own: saves drawn values, or restores.

    Returns:
        Tuple of the values; what was said of saving `elsewhere`; and what of restoring
        a new model from there, where worker 1 has nothing.
    """
    import keras

    import tfdp

    strategy = (
        tfdp.MultiWorkerMirroredStrategy()
        if use_strategy
        else tf.distribute.get_strategy()
    )

    def new_model(*, is_built: bool) -> keras.Model:
        with strategy.scope():
            inputs = keras.Input((6,))
            outputs = keras.layers.Dense(3, name="dense")(inputs)
            model = keras.Model(inputs, outputs)
            model.compile(keras.optimizers.Adam(0.01), "mse")
            if is_built:
                model.optimizer.build(model.trainable_variables)
        return model

    model = new_model(is_built=True)
    variables = [*model.variables, *model.optimizer.variables]
    said, answered = "", ""
    if is_saved:
        draw = np.random.default_rng(0)
        for variable in variables:
            variable.assign(draw.integers(1, 1000, variable.shape))
        checkpoint.save(model, directory)
        try:
            checkpoint.save(model, elsewhere)
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        found = directory if elsewhere.endswith("0") else elsewhere
        try:
            checkpoint.restore(new_model(is_built=False), found)
        except (ValueError, RuntimeError) as error:
            answered = f"{type(error).__name__}: {error}"
    else:
        checkpoint.restore(model, directory)
    return [np.asarray(variable) for variable in variables], said, answered


def start(
    tf_config: str | None, directory: object, elsewhere: object = ""
) -> forks.Start:
    arguments = {
        "directory": str(directory),
        "elsewhere": str(elsewhere),
        "is_saved": bool(elsewhere),
        "use_strategy": tf_config is not None,
    }
    return forks.Start(take_part, tf_config, arguments)


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory) -> tuple[pathlib.Path, list[forks.Answer]]:
    """What two workers have saved together, and then not, into two directories."""
    folder = tmp_path_factory.mktemp("two")
    starts = [
        start(config, folder / "shared", folder / f"own-{rank}")
        for rank, config in enumerate(cluster_configs(2))
    ]
    answers = forks.run(starts, DEADLINE_SECONDS)
    assert [answer.text for answer in answers] == [""] * 2
    return folder / "shared", answers


@pytest.mark.processes
def test_two_workers_save_what_one_device_and_three_workers_restore(saved_by_two):
    directory, (saved, _) = saved_by_two
    writers = {part.worker for part in load_index(str(directory)).shards}
    assert writers == {0, 1}
    configs = [*cluster_configs(3), None]
    for answer in forks.run([start(c, directory) for c in configs], DEADLINE_SECONDS):
        assert answer.text == ""
        for own, other in zip(saved.value[0], answer.value[0], strict=True):
            assert own.all()
            assert np.array_equal(own, other)


@pytest.mark.processes
def test_two_workers_without_a_shared_directory_both_say_so(saved_by_two):
    _, answers = saved_by_two
    for answer in answers:
        said = answer.value[1]
        assert said.startswith("ValueError: ")
        assert "worker 1: the folder that worker 0 created is" in said


@pytest.mark.processes
def test_two_workers_of_which_one_finds_no_checkpoint_both_say_so(saved_by_two):
    _, answers = saved_by_two
    for answer in answers:
        said = answer.value[2]
        assert said.startswith(
            "ValueError: The checkpoint was not restored: worker 1: "
        )
        assert "There is no checkpoint in" in said
