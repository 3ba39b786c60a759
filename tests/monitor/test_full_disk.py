"""A disk that fills in the middle of a training, on a file system of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
from tests.harness.commands import ROOT
from tests.harness.timing import wait_until

SIZE = "256k"


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to be allowed to mount")
    try:
        yield folder
    finally:
        # Also where a file is still open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    size = os.statvfs(folder)
    assert size.f_blocks * size.f_frsize < 2**20  # and not the machine's own
    with open(folder / "filler", "ab", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with contextlib.suppress(OSError):
            while True:
                file.write(b"x")


class Fill(keras.callbacks.Callback):
    """Fills the disk after the eleventh batch, when backups so far are complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 10:
            for backup in self._folder.glob("backups/step-*"):
                wait_until((backup / "index.json").exists, str(backup))
            fill(self._folder)


def fit(folder: Path | None, callback: Any) -> keras.callbacks.History:
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((32, 2), "float32")
    callbacks = [callback, *([] if folder is None else [Fill(folder)])]
    return model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=callbacks)


OBSERVERS: dict[str, Callable[[Path], Any]] = {
    "monitor": lambda folder: tfdp.callbacks.CommunicationMonitor(folder, every=4),
    "timeline": lambda folder: tfdp.callbacks.Timeline(
        folder / "timeline.json", steps=(12, 14)
    ),
}


@pytest.mark.parametrize("name", OBSERVERS)
def test_reports_that_a_full_disk_cannot_hold_end_with_one_sentence(name, disk):
    with pytest.warns(UserWarning, match=r"` could not (be written|write all)") as w:
        history = fit(disk, OBSERVERS[name](disk))
    assert len(history.history["loss"]) == 1
    (said,) = [str(w.message) for w in w if "could not" in str(w.message)]
    assert "No space left on device" in said
    assert "\n" not in said
    assert "{{" not in said


def test_a_backup_that_a_full_disk_cannot_hold_leaves_those_before(disk):
    backup = tfdp.callbacks.BackupAndRestore(disk / "backups", save_freq=6)
    with pytest.raises(OSError, match=r"[^\n]* No space left on device\. The [^\n]*"):
        fit(disk, backup)
    assert (disk / "backups" / "step-6" / "index.json").exists()
    (disk / "filler").unlink()
    again = tfdp.callbacks.BackupAndRestore(disk / "backups", save_freq=6)
    fit(None, again)
    assert not (disk / "backups").exists()


PRINTS = """
import sys
for number in range(2000):
    print(number, "x" * 200, flush=True)
"""


@pytest.mark.processes
def test_logs_that_a_full_disk_cannot_hold_end_and_the_job_goes_on(disk, tmp_path):
    """The workers' files, and the lines of JSON that go to a file."""
    script = tmp_path / "script.py"
    script.write_text(PRINTS)
    line = ("--log-dir", str(disk / "logs"), "--log-format", "json")
    command = [sys.executable, "-m", "tfdp", "run", "-n", "2", *line, str(script)]
    with open(disk / "output.jsonl", "wb") as output:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"worker-{rank}.log cannot be written (No space left" in done.stderr
    assert "the output cannot be written (No space left" in done.stderr
    assert done.stderr.count("cannot be written") == 3
    assert "Traceback" not in done.stderr
