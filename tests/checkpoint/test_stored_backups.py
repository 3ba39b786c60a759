"""Backups in an object store are rotated, found and resumed as those in a folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import bucket
from tests.checkpoint.test_backup_files import PLAIN, cut_run
from tests.data.test_position import Cut, arrays, assert_same, fit
from tests.harness.tiers import full
from tfdp.callbacks import BackupAndRestore
from tfdp.checkpoint import object_store
from tfdp.checkpoint.index_file import load_index
from tfdp.ground.base.temporary import temporary_name

pytestmark = pytest.mark.slow

URL = "bucket://runs/mine"


@pytest.fixture
def store(tmp_path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    bucket.install(folder)
    return folder


def steps(store: Path) -> list[str]:
    """The backups that have an object, in the order of their names."""
    return sorted({name.split("/")[2] for name in bucket.objects(store)})


def check_no_strays(store: Path, kept: list[str]) -> None:
    """Only what the indexes of these backups list is there, and the indexes."""
    wanted = []
    for name in kept:
        index = load_index(f"{URL}/{name}")
        shards = [file.name for part in index.shards for file in part.files]
        wanted += [f"runs/mine/{name}/{index.token}/{file}" for file in shards]
        wanted.append(f"runs/mine/{name}/index.json")
    assert list(bucket.objects(store)) == sorted(wanted)


def test_the_newest_are_kept_and_no_stray_object(store):
    cut_run(URL, step=7, keep=2)
    check_no_strays(store, ["step-6", "step-7"])


def test_a_run_goes_on_as_one_that_nothing_cut_and_leaves_nothing(store):
    undisturbed = fit(arrays(**PLAIN))
    cut_run(URL, step=7)
    watch = Cut()
    found = fit(arrays(**PLAIN), BackupAndRestore(URL, 1), watch)
    assert watch.seen[0] == (1, 2)
    assert_same(found, undisturbed)
    assert bucket.objects(store) == {}


def test_a_probe_that_a_killed_start_has_put_is_removed(store):
    """At once on the same host; of another host when it is old."""
    own, running = temporary_name("probe"), temporary_name("probe")
    killed = own.replace(f"-{os.getpid()}-", "-0-")
    elsewhere = [f"tfdp-probe-00000000-1-1-{age}" for age in ("old", "new")]
    for name in (killed, running, *elsewhere):
        bucket.Bucket().pipe_file(f"runs/mine/.{name}", b"")
    old = bucket.objects(store)[f"runs/mine/.{elsewhere[0]}"]
    os.utime(old, (0, 0))
    cut_run(URL, step=1)
    assert steps(store) == sorted([f".{elsewhere[1]}", f".{running}", "step-1"])


def test_a_damaged_backup_is_set_aside_and_the_one_before_is_taken(store):
    cut_run(URL, step=7)
    lost = next(n for n in bucket.objects(store) if "step-7" in n and ".data" in n)
    bucket.objects(store)[lost].unlink()
    watch = Cut(2)
    with pytest.warns(UserWarning, match=r"'step-6', since newer backups are damaged"):
        cut_run(URL, watch, step=2, keep=1)
    assert watch.seen[0] == (1, 1)
    assert steps(store) == ["step-7", "step-7.damaged"]
    assert load_index(f"{URL}/step-7.damaged").run["steps"] == 7


def test_a_damaged_backup_that_cannot_be_renamed_is_said_to_be_so(store, monkeypatch):
    cut_run(URL, step=7)
    lost = next(n for n in bucket.objects(store) if "step-7" in n and ".data" in n)
    bucket.objects(store)[lost].unlink()

    def refuse(*names):
        raise PermissionError("renaming is denied")

    monkeypatch.setattr(object_store.ObjectStore, "rename", refuse)
    text = r"damaged. Not all can be renamed \(renaming is denied\). Received: step-7"
    with pytest.warns(UserWarning, match=text):
        cut_run(URL, Cut(2), step=2, keep=1)
    assert steps(store) == ["step-7"]
    assert load_index(f"{URL}/step-7").run["steps"] == 7


@pytest.mark.full
def test_what_a_killed_save_has_put_goes_with_the_next_one(store):
    cut_run(URL, step=6)
    left = "runs/mine/step-7/data-0123456789ab/worker-0-0.data"
    bucket.Bucket().pipe_file(left, b"left")
    assert steps(store) == ["step-4", "step-5", "step-6", "step-7"]
    cut_run(URL, step=1)
    check_no_strays(store, ["step-5", "step-6", "step-7"])


class Away(Exception):
    pass


@pytest.mark.parametrize("verb", ["list", full("head"), full("get")])
def test_a_store_that_is_away_lets_no_run_begin_anew_or_from_an_older_one(store, verb):
    cut_run(URL, step=7)
    before = list(bucket.objects(store))

    def hook(made: str, path: str, is_done: bool) -> None:
        if made == verb and (verb == "list" or "step-7" in path):
            raise Away("no route")

    bucket.install(store, hook)
    watch = Cut()
    with pytest.raises(OSError, match=r"cannot be \w+ \(Away: no route\)"):
        fit(arrays(**PLAIN), BackupAndRestore(URL, 1), watch)
    assert watch.seen == []
    bucket.install(store)
    assert list(bucket.objects(store)) == before


@pytest.mark.parametrize("verb", ["put", "delete"])
def test_a_store_without_permission_is_told_of_before_training(store, verb):
    def hook(made: str, path: str, is_done: bool) -> None:
        if made == verb:
            raise PermissionError("Access Denied")

    bucket.install(store, hook)
    watch = Cut()
    message = r"\(PermissionError: Access Denied\)\. Nothing was trained"
    with pytest.raises(OSError, match=message):
        fit(arrays(**PLAIN), BackupAndRestore(URL, 1), watch)
    assert watch.seen == []


def test_a_store_that_vanishes_ends_training_and_leaves_the_backups(store):
    cut_run(URL, step=7)

    def hook(made: str, path: str, is_done: bool) -> None:
        if made == "put" and "step-8" in path:
            raise Away("no route")

    bucket.install(store, hook)
    with pytest.raises(OSError, match=r"step-8/data-.* cannot be written \(Away"):
        fit(arrays(**PLAIN), BackupAndRestore(URL, 1))
    bucket.install(store)
    check_no_strays(store, ["step-5", "step-6", "step-7"])
    watch = Cut(1)
    cut_run(URL, watch, step=0)
    assert watch.seen == [(1, 2)]


class Unavailable(Exception):
    """What a client of a store raises once it has tried often enough."""


class Faulty:
    """Hook of a store that answers one request with a fault, or each one slowly.

    Args:
        number: Int, the request that gets the fault, from 0; -1 for none.
        fault: Callable.
    """

    def __init__(self, number: int, fault: Callable[[], Any] = lambda: None) -> None:
        self.count, self._number, self._fault = 0, number, fault

    def __call__(self, verb: str, path: str, is_done: bool) -> None:
        if is_done:
            return
        self.count += 1
        if self.count - 1 == self._number:
            self._fault()


def unavailable() -> None:
    raise Unavailable("503 Slow Down")


def try_a_fault(
    store: Path, tmp_path: Path, hook: Faulty, undisturbed: Any, capfd: Any
) -> bool:
    """A run that meets a fault ends with a sentence, or as if there had been none.

    Whatever it was, the next one goes on exactly. Returns whether it has ended so.
    """
    saved = shutil.copytree(store, tmp_path / "tried")
    bucket.install(saved, hook)
    said = ""
    capfd.readouterr()
    try:
        with warnings.catch_warnings():
            # Of what could not be removed.
            warnings.filterwarnings("ignore", message="The checkpoint was saved")
            cut_run(URL, step=2, keep=2)
    except OSError as error:
        said = str(error)
    # Of the last save, whose run was cut before another call could raise it.
    printed = re.search(
        "tfdp: (The checkpoint was not saved.*)", capfd.readouterr().err
    )
    said = said or (printed[1] if printed else "")
    assert not said or re.search(r"503 Slow Down|no answer in \d+ s", said)
    assert "\n" not in said
    bucket.install(saved)
    assert_same(fit(arrays(**PLAIN), BackupAndRestore(URL, 1)), undisturbed)
    left = [name for name in bucket.objects(saved) if "/data-" in name]
    shutil.rmtree(saved)
    assert not left
    return bool(said)


@pytest.mark.full
@pytest.mark.parametrize("of_each", [20, full(6), full(1)])
def test_a_request_that_gets_a_503_ends_the_run_in_a_sentence_and_loses_nothing(
    store, tmp_path, of_each, capfd
):
    """Each request in turn, of a start and two backups."""
    undisturbed = fit(arrays(**PLAIN))
    cut_run(URL, step=7, keep=2)
    counted = Faulty(-1)
    assert not try_a_fault(store, tmp_path, counted, undisturbed, capfd)
    assert counted.count > 40
    numbers = range(0, counted.count, of_each)
    ended = [
        try_a_fault(store, tmp_path, Faulty(number, unavailable), undisturbed, capfd)
        for number in numbers
    ]
    # What cannot be removed is left for the next save.
    assert any(ended)
    assert not all(ended)


@pytest.mark.full
def test_a_store_that_is_slow_changes_nothing(store, tmp_path, capfd):
    undisturbed = fit(arrays(**PLAIN))
    cut_run(URL, step=7, keep=2)

    class Slow(Faulty):
        def __call__(self, verb: str, path: str, is_done: bool) -> None:
            time.sleep(0.02)

    assert not try_a_fault(store, tmp_path, Slow(-1), undisturbed, capfd)


@pytest.mark.parametrize("verb", ["put", full("delete"), full("list")])
def test_a_store_that_does_not_answer_in_a_backup_ends_the_run(
    store, tmp_path, monkeypatch, verb, capfd
):
    """What it does too late, when nobody waits any more, does no harm."""
    undisturbed = fit(arrays(**PLAIN))
    cut_run(URL, step=7, keep=2)
    monkeypatch.setattr(object_store, "_REQUEST_SECONDS", 1.0)
    done = threading.Event()

    class Late(Faulty):
        def __call__(self, made: str, path: str, is_done: bool) -> None:
            if made == verb and "step-8" in path and not is_done:
                with contextlib.suppress(RuntimeError):  # started by another request
                    timer.start()
                    # The run that follows has no such limit, which load could reach.
                    object_store._REQUEST_SECONDS = 60.0
                done.wait(20.0)

    timer = threading.Timer(3.0, done.set)
    try:
        is_said = try_a_fault(store, tmp_path, Late(-1), undisturbed, capfd)
        assert is_said == (verb != "delete")
    finally:
        done.set()
        timer.cancel()


class Terminate(Cut):
    """Is told at a step that the machine will be taken away."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if len(self.seen) == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_into_the_store(store):
    with pytest.raises(SystemExit):
        fit(arrays(**PLAIN), Terminate(7), BackupAndRestore(URL, 1000))
    check_no_strays(store, ["step-7"])
