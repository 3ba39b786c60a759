"""States in the memory of one host: what is damaged, foreign or too large."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.checkpoint.test_backup_files import PLAIN
from tests.data.test_position import (
    EPOCHS,
    STEPS,
    Cut,
    PowerCut,
    arrays,
    assert_same,
    build,
    fit,
)
from tests.harness.timing import wait_until
from tfdp.callbacks import BackupAndRestore, backup_and_restore, run_state
from tfdp.checkpoint import host_memory
from tfdp.checkpoint.memory_backups import MemoryBackups
from tfdp.communication.coordination.preemption import PREEMPTED

pytestmark = pytest.mark.slow

# Step at which each run is cut; the last state in memory is of the step before.
CUT = 4


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> Path:
    """The folder that stands for the memory of this host."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(host_memory, "ROOT", str(folder))
    return folder


@pytest.fixture
def backups(tmp_path) -> Path:
    return tmp_path / "backups"


@pytest.fixture(scope="module")
def undisturbed() -> tuple:
    return fit(arrays(**PLAIN))


def to(folder: Path, **options: Any) -> BackupAndRestore:
    return BackupAndRestore(folder, **{"memory_every": 1} | options)


def cut(folder: Path, step: int = CUT, **options: Any) -> None:
    with pytest.raises(PowerCut):
        fit(arrays(**PLAIN), to(folder, **options), Cut(step))


def resumed_at(folder: Path, capfd, undisturbed, **options: Any) -> tuple[int, str]:
    """The step of the first epoch at which a run goes on exactly, and from where."""
    capfd.readouterr()
    assert_same(fit(arrays(**PLAIN), to(folder, **options)), undisturbed)
    said = re.search(
        r"resumed at step (\d+) of epoch 1, from (.*)\n", capfd.readouterr().err
    )
    return (int(said[1]), said[2]) if said else (1, "")


def headers(memory: Path) -> list[Path]:
    """The headers in memory, the older first."""
    found = memory.glob("tfdp-memory-*/*.json")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def test_two_states_are_held_and_the_newest_is_used(
    memory, backups, capfd, undisturbed
):
    cut(backups)
    assert len(headers(memory)) == 2
    assert resumed_at(backups, capfd, undisturbed) == (CUT, "memory")
    assert not list(memory.iterdir())
    assert not backups.exists()


def test_a_run_that_resumes_from_memory_reads_no_backup(
    memory, backups, capfd, undisturbed, monkeypatch
):
    def refuse(*arguments: Any) -> None:
        pytest.fail("A backup in the directory was read.")

    cut(backups, save_freq=2)
    assert (backups / "step-2" / "index.json").exists()
    monkeypatch.setattr("tfdp.checkpoint.backups.load_index", refuse)
    monkeypatch.setattr("tfdp.checkpoint.files.read_data", refuse)
    found = resumed_at(backups, capfd, undisturbed, save_freq=2)
    assert found == (CUT, "memory")


@pytest.mark.parametrize("save_freq", ["epoch", STEPS])
def test_at_the_end_of_an_epoch_the_state_after_it_is_used(
    save_freq, memory, backups, capfd, undisturbed
):
    """What other callbacks do at that end is not done again."""
    epochs = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            epochs.append(epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if len(epochs) == 1:
                epochs.append("cut")
                raise PowerCut

    options = {"save_freq": save_freq, "memory_every": STEPS}
    with pytest.raises(PowerCut):
        fit(arrays(**PLAIN), to(backups, **options), Watch())
    capfd.readouterr()
    found = fit(arrays(**PLAIN), to(backups, **options), Watch())
    assert "resumed at step 1 of epoch 2, from memory" in capfd.readouterr().err
    assert_same(found, undisturbed)
    assert epochs == [0, "cut", *range(1, EPOCHS)]


def test_with_local_steps_it_waits_until_replicas_have_synchronized(
    memory, backups, undisturbed, monkeypatch
):
    class Syncs:
        def batches_between_syncs(self, model: Any, **options: Any) -> int:
            return 2

    saved, save = [], MemoryBackups.save

    def noted(self: MemoryBackups, step: int, *arguments: Any) -> None:
        saved.append(step)
        save(self, step, *arguments)

    monkeypatch.setattr(backup_and_restore, "LOCAL_STEPS", Syncs())
    monkeypatch.setattr(MemoryBackups, "save", noted)
    assert_same(fit(arrays(**PLAIN), to(backups, memory_every=3)), undisturbed)
    # Due after 3, 6, 9 and so on; of three epochs the ends are saved too. Replicas
    # synchronize every two batches after the beginning of an epoch, and after a save.
    assert saved == [4, 5, 7, 9, 10, 12, 15]


def test_a_run_that_gave_up_gathers_nothing_more(
    memory, backups, undisturbed, monkeypatch
):
    """Neither random states nor those of callbacks."""
    gathered, gather = [], run_state.gather_random_states

    def noted(*arguments: Any) -> Any:
        gathered.append(arguments)
        return gather(*arguments)

    no_room(monkeypatch, memory)
    monkeypatch.setattr(run_state, "gather_random_states", noted)
    with pytest.warns(UserWarning, match="Nothing is saved in memory any more"):
        found = fit(arrays(**PLAIN), to(backups, save_freq=1000))
    assert_same(found, undisturbed)
    assert len(gathered) == 1


def test_a_second_process_of_the_run_keeps_out(memory, backups, undisturbed):
    """It would write the same memory."""
    other = host_memory.HostMemory(str(backups))
    pid = os.fork()
    if pid == 0:
        other.open()
        other.take_lock(0)
        time.sleep(60.0)
        os._exit(0)
    try:
        wait_until(lambda: list(memory.glob("*/part-0.lock")), "the lock")
        time.sleep(0.1)
        with pytest.warns(UserWarning, match="another process of the same run"):
            assert_same(fit(arrays(**PLAIN), to(backups)), undisturbed)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_no_worker_writes_again_is_freed(memory, backups, capfd, undisturbed):
    cut(backups)
    (folder,) = memory.iterdir()
    for name in ("part-1-0.data", "part-1-1.json", "part-0-1.json.new"):
        (folder / name).write_text("left")
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.extend(path.name for path in folder.glob("part-[0-9]*-*"))

    fit(arrays(**PLAIN), to(backups), Watch())
    files = {
        f"part-0-{slot}.{ending}" for slot in (0, 1) for ending in ("data", "json")
    }
    assert set(seen) == files


def test_a_damaged_state_is_not_used(memory, backups, capfd, undisturbed):
    for number, damage in enumerate((cut_data, alter_header, remove_data, truncate)):
        cut(backups)
        damage(headers(memory)[-1])
        step, source = resumed_at(backups, capfd, undisturbed)
        assert (step, source) == (CUT - 1, "memory"), number


def cut_data(header: Path) -> None:
    os.truncate(header.with_suffix(".data"), 3)


def remove_data(header: Path) -> None:
    header.with_suffix(".data").unlink()


def alter_header(header: Path) -> None:
    text = header.read_text()
    header.write_text(text.replace('"batches": 3', '"batches": 2', 1))
    assert header.read_text() != text


def truncate(header: Path) -> None:
    os.truncate(header, 100)


def test_a_header_that_does_not_fit_the_state_is_reported(
    memory, backups, capfd, undisturbed
):
    """Its checksum is right, but elements of a tensor are missing."""
    cut(backups, memory_every=3)
    (header,) = headers(memory)
    parsed = host_memory.PartHeader.from_text(header.read_text())
    forged = dataclasses.replace(parsed, extents=parsed.extents[1:])
    header.write_text(forged.to_text())
    with pytest.warns(UserWarning, match="state in memory is not used: Elements of"):
        assert resumed_at(backups, capfd, undisturbed) == (1, "")


def test_who_deletes_the_directory_starts_anew(memory, backups, capfd, undisturbed):
    cut(backups)
    shutil.rmtree(backups)
    assert resumed_at(backups, capfd, undisturbed) == (1, "")


def test_a_run_that_keeps_nothing_in_memory_drops_what_is_there(
    memory, backups, capfd, undisturbed
):
    """It may end, or train past it."""
    cut(backups)
    cut(backups, step=2, memory_every=None)
    assert not list(memory.iterdir())
    assert resumed_at(backups, capfd, undisturbed) == (1, "")


def test_a_newer_backup_of_the_directory_is_used(memory, backups, capfd, undisturbed):
    cut(backups, memory_every=2, save_freq=1, background=False)
    found = resumed_at(backups, capfd, undisturbed, save_freq=1)
    assert found == (CUT, str(backups))


def test_a_state_of_another_model_is_refused(memory, backups):
    cut(backups)

    def other(steps_per_execution: int) -> keras.Model:
        model = build(steps_per_execution)
        model.compile("sgd", "mse")
        return model

    with pytest.raises(ValueError, match=r"another run.*optimizer.*\(in memory\)"):
        fit(arrays(**PLAIN), to(backups), make_model=other)
    assert len(headers(memory)) == 2


def no_room(monkeypatch, memory: Path) -> str:
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 100)
    return r"take 0 MB more, and 0 MB of its memory are free"


def full_file_system(monkeypatch, memory: Path) -> str:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    return r"No space left on device"


def no_memory_at_all(monkeypatch, memory: Path) -> str:
    monkeypatch.setattr(host_memory, "ROOT", str(memory / "file" / "below"))
    (memory / "file").touch()
    return r"does not exist"


@pytest.mark.parametrize(
    "lack", [no_room, full_file_system, no_memory_at_all], ids=lambda x: x.__name__
)
def test_without_memory_training_continues_and_says_so_once(
    lack, memory, backups, undisturbed, monkeypatch
):
    expected = lack(monkeypatch, memory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(arrays(**PLAIN), to(backups, delete_at_end=False))
    said = [str(w.message) for w in caught if "in memory" in str(w.message)]
    assert len(said) == 1
    assert re.search(f"Nothing is saved in memory any more.*{expected}", said[0])
    assert_same(found, undisturbed)
    assert {path.name for path in backups.iterdir()} >= {
        f"step-{STEPS * epoch}" for epoch in range(1, EPOCHS + 1)
    }
    assert not headers(memory)


def test_a_folder_of_another_owner_is_not_used(memory, backups, undisturbed):
    own = host_memory.HostMemory(str(backups))
    elsewhere = memory.parent / "elsewhere"
    elsewhere.mkdir()
    Path(own.path).symlink_to(elsewhere)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert_same(fit(arrays(**PLAIN), to(backups)), undisturbed)
    assert not list(elsewhere.iterdir())


def test_a_preempted_run_frees_its_memory(memory, backups, capfd, undisturbed):
    class Terminate(Cut):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if len(self.seen) == CUT:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as raised:
        fit(arrays(**PLAIN), to(backups), Terminate(99))
    assert raised.value.code == PREEMPTED
    assert not list(memory.iterdir())
    step, source = resumed_at(backups, capfd, undisturbed)
    assert (step, source) == (CUT + 1, str(backups))


def test_memory_that_no_run_resumed_for_a_day_is_freed(memory, backups, undisturbed):
    old, new = (memory / f"tfdp-memory-{os.geteuid()}-{digit * 16}" for digit in "ab")
    foreign = memory / "tfdp-memory-else"
    for folder in (old, new, foreign):
        folder.mkdir()
    yesterday = time.time() - 86500
    for folder in (old, foreign):
        os.utime(folder, (yesterday, yesterday))
    fit(arrays(**PLAIN), to(backups))
    assert sorted(memory.iterdir()) == sorted([new, foreign])


@pytest.mark.parametrize("every", [0, -1, 1.5, "epoch", True])
def test_a_wrong_interval_is_refused(every, backups):
    with pytest.raises(ValueError, match=re.escape(f"memory_every={every!r}")):
        to(backups, memory_every=every)
