"""A checkpoint in an object store is one as in a folder, whatever the store does."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import bucket
from tests.checkpoint.test_api import (
    Killed,
    check_nothing_loaded,
    folders,
    holds,
    make_workers,
    on_workers,
    restore,
    save,
    values,
)
from tests.harness.tiers import full
from tfdp.checkpoint import api, files, object_store
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.index_file import INDEX_FILE, load_index
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.training.sharding.state_tensors import StateTensor

URL = "bucket://runs/latest"


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """The folder of an empty store; parts are small, so that there are many."""
    monkeypatch.setattr(files, "SHARD_BYTES", 300)
    folder = tmp_path / "store"
    folder.mkdir()
    bucket.install(folder)
    return folder


def names(store: Path) -> list[str]:
    """What follows the URL in the names of the objects; all of them begin with it."""
    beginning = URL.partition("://")[2] + "/"
    found = list(bucket.objects(store))
    assert all(name.startswith(beginning) for name in found), found
    return [name[len(beginning) :] for name in found]


def check_no_strays(store: Path) -> None:
    """Only what the index lists is there, and the index."""
    index = load_index(URL)
    listed = [f"{index.token}/{f.name}" for part in index.shards for f in part.files]
    assert names(store) == sorted([*listed, INDEX_FILE])


def test_a_save_puts_the_bytes_that_a_local_one_writes(store, tmp_path):
    tensors = values()
    local = tmp_path / "local"
    assert save(tensors, local) == save(tensors, URL) == [None] * 2
    assert load_index(URL).shards == load_index(str(local)).shards
    check_no_strays(store)
    token = load_index(URL).token
    (folder,) = folders(local)
    for path in folder.iterdir():
        own = bucket.objects(store)[f"runs/latest/{token}/{path.name}"]
        assert own.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("saved_by", [1, 3])
def test_any_number_of_workers_restores_it(store, saved_by):
    save(values(), URL, saved_by)
    for count in (1, 2, 4):
        assert holds(values(), URL, count)


def names_of_files(state: list[StateTensor], index: Index) -> list[str]:
    """The files that a worker needs to restore these tensors."""
    shards = api.reading.needed_shards(state, index)
    return [file.name for shard in shards for file in shard.files]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_worker_downloads_each_object_that_it_needs_once(store, count):
    save(values(), URL, 3)
    read: list[str] = []

    def hook(verb: str, path: str, is_done: bool) -> None:
        if verb == "get" and "/data-" in path:
            read.append(path.rpartition("/")[2])

    bucket.install(store, hook)
    replies, workers = restore(values(), URL, count)
    assert replies == [None] * count
    index = load_index(URL)
    wanted = [names_of_files(worker.state, index) for worker in workers]
    assert sorted(read) == sorted(name for names in wanted for name in names)


class Gone(Exception):
    """What a client raises when the store does not answer."""


@pytest.mark.filterwarnings("ignore:The checkpoint was saved, but files of older")
@pytest.mark.parametrize(
    ("error", "is_after"),
    [(Killed(), False), full(Killed(), True), full(Gone("no route"), False)],
)
def test_a_save_that_is_cut_off_anywhere_leaves_a_whole_checkpoint(
    store, tmp_path, monkeypatch, error, is_after
):
    """Before or after each request, the first to the last; the store stays away."""
    monkeypatch.setattr(files, "SHARD_BYTES", 1500)
    old, new = values(0), values(1)
    (new_state,) = (worker.state for worker in make_workers(new, 1, is_filled=True))
    save(old, URL, 3)
    for number in itertools.count():
        own = shutil.copytree(store, tmp_path / str(number))
        num_requests = _cut_off_at(number, own, error, is_after)
        with contextlib.suppress(Killed, OSError):
            api.save_state(new_state, URL, WorkerGroup(0, 1))
        bucket.install(own)
        is_new = holds(new, URL, 1)
        assert is_new or holds(old, URL, 1)
        assert save(old, URL, 2) == [None] * 2
        assert holds(old, URL, 1)
        check_no_strays(own)
        if num_requests() <= number:  # nothing was in its way
            assert is_new
            break
    assert number > 7


def _cut_off_at(
    number: int, folder: Path, error: BaseException, is_after: bool
) -> Callable[[], int]:
    """Fails all requests from one on; returns what tells how many were made."""
    count = itertools.count()

    def hook(verb: str, path: str, is_done: bool) -> None:
        if is_done is is_after and next(count) >= number:
            raise error

    bucket.install(folder, hook)
    return lambda: next(count)


def _refuse(verb: str, beginning: str, error: Exception, after: int = 0) -> bucket.Hook:
    """A hook that fails what is asked of objects whose last part begins so."""
    count = itertools.count()

    def hook(made: str, path: str, is_done: bool) -> None:
        name = path.rpartition("/")[2]
        counts = made == verb and name.startswith(beginning) and not is_done
        if counts and next(count) >= after:
            raise error

    return hook


def test_what_one_worker_may_not_put_all_are_told_of(store):
    save(values(0), URL)
    before = names(store)
    denied = PermissionError("Access\nDenied")
    bucket.install(store, _refuse("put", "worker-1-", denied, after=1))
    replies = save(values(1), URL, 3)
    bucket.install(store)
    assert [type(reply) for reply in replies] == [OSError] * 3
    assert len({str(reply) for reply in replies}) == 1
    for words in (
        "The checkpoint was not saved: worker 1: 'bucket://runs/latest/data-",
        "/worker-1-1.data' cannot be written (PermissionError: Access "
        "Denied). The save has not changed the previous contents of the directory.",
        f"Received: directory={URL!r}",
    ):
        assert words in str(replies[0])
    assert names(store) == before  # what was uploaded is removed
    assert holds(values(0), URL)


def test_a_store_that_vanishes_is_told_of_on_all_workers(store):
    save(values(0), URL)
    bucket.install(store, _refuse("put", "", Gone("no route"), after=9))
    replies = save(values(1), URL, 3)
    assert {type(reply) for reply in replies} == {OSError}
    assert "cannot be written (Gone: no route)" in str(replies[0])
    bucket.install(store)
    assert holds(values(0), URL)
    save(values(2), URL)
    check_no_strays(store)


def test_a_store_that_never_answers_is_given_up(store, monkeypatch):
    save(values(0), URL)
    over = threading.Event()

    def hook(verb: str, path: str, is_done: bool) -> None:
        if verb == "put" and path.endswith("/worker-1-1.data"):
            over.wait(60)

    bucket.install(store, hook)
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "_REQUEST_SECONDS", 0.5)
        replies = save(values(1), URL)
    over.set()
    assert {type(reply) for reply in replies} == {OSError}
    words = "worker-1-1.data' cannot be written (TimeoutError: no answer in 0.5 s)"
    assert words in str(replies[0])
    bucket.install(store)
    assert holds(values(0), URL)


def test_an_index_that_the_store_puts_after_all_is_whole(store, monkeypatch):
    """The PUT is given up, and the store makes it later."""
    save(values(0), URL)
    goes_on, is_put = threading.Event(), threading.Event()

    def hook(verb: str, path: str, is_done: bool) -> None:
        if verb == "put" and path.endswith(INDEX_FILE):
            (is_put.set if is_done else goes_on.wait)()

    bucket.install(store, hook)
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "_REQUEST_SECONDS", 0.5)
        replies = save(values(1), URL)
    assert {type(reply) for reply in replies} == {OSError}
    assert holds(values(0), URL)
    goes_on.set()
    assert is_put.wait(60)
    bucket.install(store)
    assert holds(values(1), URL)
    save(values(2), URL)
    check_no_strays(store)


def test_what_worker_0_does_not_see_is_no_checkpoint(store):
    bucket.install(store, _refuse("head", "worker-1.json", FileNotFoundError("none")))
    replies = save(values(), URL)
    assert {type(reply) for reply in replies} == {ValueError}
    assert "the files that worker 1 wrote are not visible here" in str(replies[0])


def test_objects_that_may_not_be_removed_are_told_of_and_the_save_counts(store):
    save(values(0), URL, 1)
    bucket.install(store, _refuse("delete", "", PermissionError("Access Denied")))
    with pytest.warns(UserWarning, match=r"files of older ones were not removed"):
        assert save(values(1), URL, 1) == [None]
    bucket.install(store)
    assert holds(values(1), URL)
    save(values(2), URL)
    check_no_strays(store)


@pytest.mark.parametrize(
    ("verb", "after"), [("head", 0), ("get", 0), ("get", 9), ("list", 0), ("list", 1)]
)
def test_a_store_that_is_away_is_no_damage(store, verb, after):
    save(values(), URL)
    bucket.install(store, _refuse(verb, "", Gone("no route"), after))
    replies, workers = restore(values(), URL)
    assert {type(reply) for reply in replies} == {OSError}
    assert "(Gone: no route). Nothing was loaded" in str(replies[0])
    check_nothing_loaded(workers)


def test_a_store_that_vanishes_while_tensors_are_read_says_what_that_leaves(
    store, monkeypatch
):
    monkeypatch.setattr(api, "memory_budget", lambda group: 0)
    save(values(), URL, 1)
    num_files = 2 * len(load_index(URL).shards)
    # The index, and each file for its checksum.
    hook = _refuse("get", "", Gone("no route"), after=1 + num_files)
    bucket.install(store, hook)
    (reply,), _ = restore(values(), URL, 1)
    assert isinstance(reply, OSError)
    assert "(Gone: no route). Some variables may have been overwritten" in str(reply)


@pytest.mark.parametrize("damage", [full("missing"), "altered"])
def test_a_damaged_object_is_named(store, damage):
    save(values(), URL)
    for name, path in bucket.objects(store).items():
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        replies, workers = restore(values(), URL)
        assert {type(reply) for reply in replies} == {ValueError}
        assert name.rpartition("/")[2] in str(replies[0])
        check_nothing_loaded(workers)
        path.write_bytes(content)
    assert holds(values(), URL)


def test_other_objects_of_the_bucket_stay(store):
    others = [
        "runs/latest-2/index.json",
        "runs/latest/notes",
        "runs/latest/data-mine/x",
    ]
    for other in others:
        bucket.Bucket().pipe_file(other, b"mine")
    for seed in (0, 1):
        save(values(seed), URL)
    assert set(others) <= set(bucket.objects(store))
    assert holds(values(1), URL)


def _without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed


@pytest.mark.parametrize(
    ("url", "missing", "message"),
    [
        ("s3://b/run", "fsspec", r"needs fsspec; `pip install tfdp\[fsspec\] s3fs`"),
        ("new://b/run", "fsspec", r"needs fsspec; `pip install tfdp\[fsspec\]`"),
        (
            "gs://b/run",
            "gcsfs",
            r"`gs://` cannot be imported \(.*; `pip install gcsfs`",
        ),
        ("wandb://b/run", "wandbfs", r"client of `wandb://` cannot be imported"),
        ("new://b/run", "", "fsspec does not support `new://`"),
        ("file:///tmp/run", "", "is not an object store; mount it, and give the dir"),
        ("s3://", "", "must be followed by the name of a bucket"),
        (str(Path("s3://b/run")), "", "a URL has two slashes; give it as a string"),
    ],
)
def test_a_url_that_nothing_can_be_done_with_is_refused_in_one_sentence(
    url, missing, message, monkeypatch
):
    if missing:
        _without(missing, monkeypatch)
    for replies in (save(values(), url), restore(values(), url)[0]):
        assert {type(reply) for reply in replies} == {ValueError}
        assert "\n" not in str(replies[0])
        with pytest.raises(ValueError, match=message):
            raise replies[0]


def test_one_worker_without_what_speaks_to_the_store_is_named(store, monkeypatch):
    opened = api.open_storage

    def lacks_it(path: str) -> Any:
        if path.endswith("?"):
            raise ValueError("`bucket://` needs fsspec; `pip install tfdp[fsspec]`")
        return opened(path)

    monkeypatch.setattr(api, "open_storage", lacks_it)
    states = [worker.state for worker in make_workers(values(), 2, is_filled=True)]
    replies = on_workers(api.save_state, states, [URL, URL + "?"])
    assert {type(reply) for reply in replies} == {ValueError}
    assert "worker 1: `bucket://` needs fsspec" in str(replies[0])
    assert names(store) == []
