"""The ledger of trainings whose every sleep is scripted."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp
from tests.goodput import scripted
from tests.harness.commands import ROOT
from tests.monitor.test_full_disk import disk, fill  # noqa: F401 a fixture
from tfdp.communication.collectives import step_events
from tfdp.features.goodput import ledger, recorder, training
from tfdp.features.goodput.account import CLASSES, Shares, shares
from tfdp.ground._compat import random_seeds
from tfdp.launch.cli.goodput import goodput_of

pytestmark = pytest.mark.slow

TWO_POINTS = 0.02


@pytest.fixture(autouse=True)
def attempts(monkeypatch) -> Iterator[Any]:
    """Call it to end an attempt, as the exit of the process does."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    feature = training.FEATURE
    feature._close()
    # Time counts from the fit, and not from the start of the process.
    feature._place, feature._num_fits = "", 1
    yield feature._close
    feature._close()
    feature._place = ""


def assert_close(found: Shares, expected: dict[str, float]) -> None:
    """Each share is within two points of the script's, and none is missing."""
    total = found.total_seconds
    wrong = {
        name: (round(found.share(name), 3), round(expected.get(name, 0) / total, 3))
        for name in CLASSES
        if abs(found.share(name) - expected.get(name, 0) / total) > TWO_POINTS
    }
    assert not wrong, (wrong, total)


def read(folder: Path) -> Shares:
    return shares(ledger.read(ledger.find(str(folder))[-1]))


@pytest.mark.full
def test_each_share_of_a_job_that_was_cut_and_resumed_is_the_scripts(
    tmp_path, attempts, monkeypatch
):
    """The first attempt is cut 8 steps after its only backup, made after 20 steps."""
    folder = tmp_path / "backups"
    began = ledger.Moment.now()
    monkeypatch.setattr(ledger.Moment, "of_process_start", lambda: began)
    training.FEATURE._num_fits = 0
    first = scripted.fit(folder, scripted.cut_after(scripted.STEPS + 8))
    attempts()
    # An attempt of the same process would be no restart.
    monkeypatch.setattr(recorder, "state_and_start", lambda pid: ("R", "1"))
    time.sleep(2.0)
    second = scripted.fit(folder)
    time.sleep(scripted.AFTER_FIT_SECONDS)
    attempts()
    total = read(folder)
    assert total.num_restarts == 1
    expected = expected_seconds(vars(first), vars(second), scripted.STEPS + 8)
    expected["startup"] = first.startup
    expected["recovery"] = 2.0 + second.startup
    assert_close(total, expected)


def expected_seconds(first: dict, second: dict, cut_after: int) -> dict[str, float]:
    """What two attempts take by the script, without start-up and recovery.

    The first step of each attempt is traced.
    """
    num_steps = scripted.STEPS * scripted.EPOCHS
    again = cut_after - scripted.STEPS
    in_both = {name: first[name] + second[name] for name in first}
    return {
        "trace": in_both["first_step"] - 2 * scripted.DATA_SECONDS,
        "step": (num_steps - 1) * scripted.STEP_SECONDS,
        "data": num_steps * scripted.DATA_SECONDS + in_both["opening"],
        "again": (again - 1) * scripted.STEP_SECONDS + again * scripted.DATA_SECONDS,
        "evaluation": in_both["evaluation"],
        "save": 2 * scripted.SAVE_SECONDS,
        "idle": (num_steps + again) * scripted.IDLE_SECONDS
        + scripted.AFTER_FIT_SECONDS
        + in_both["between"],
    }


@pytest.mark.full
@pytest.mark.processes
def test_each_share_of_a_job_that_was_killed_and_restarted_is_the_scripts(tmp_path):
    folder, began = tmp_path / "backups", time.time()
    arguments = ["-n", "1", "--max-restarts", "1", "--log-dir", str(tmp_path / "logs")]
    module = ["-m", "tests.goodput.scripted", str(folder), str(scripted.STEPS + 6)]
    job = run_tfdp("run", *arguments, *module, cwd=tmp_path)
    assert job.returncode == 0, job.stdout[-3000:]
    first, second = (
        json.loads(scripted.report(folder, number).read_text()) for number in (0, 1)
    )
    total = read(folder)
    assert total.num_restarts == 1
    expected = expected_seconds(first, second, first["step"])
    expected["startup"] = first["first_batch_at"] - began
    expected["recovery"] = second["first_batch_at"] - first["at"]
    assert_close(total, expected)
    # The launcher finds the ledger beside the backups.
    assert job.stdout.splitlines()[-1] == f"tfdp: {total}"
    assert " one restart" in str(total)
    by_logs = run_tfdp("goodput", "logs", "--json", cwd=tmp_path)
    assert json.loads(by_logs.stdout)["seconds"] == total.seconds


TWO_WORKERS = """
import sys, time
import tfdp
import keras
import numpy as np

strategy = tfdp.MultiWorkerMirroredStrategy()
is_slow = strategy.cluster_resolver.task_id == 1

class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.06 * is_slow)

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("sgd", "mse")
x = np.ones((8 * 100, 8), "float32")
monitor = tfdp.callbacks.CommunicationMonitor("monitored")
model.fit(x, x, batch_size=8, callbacks=[Slow(), monitor], verbose=0)
"""


@pytest.mark.full
@pytest.mark.processes
def test_waiting_for_a_slow_worker_is_exposed_communication(tmp_path):
    """Worker 0 waits in nearly each step for the time by which worker 1 is late."""
    (tmp_path / "train.py").write_text(TWO_WORKERS)
    job = run_tfdp("run", "-n", "2", "--log-dir", "logs", "train.py", cwd=tmp_path)
    assert job.returncode == 0, job.stdout[-3000:]
    total = read(tmp_path / "logs")
    assert total.measures_communication
    assert total.seconds["exposed"] > 0.9 * 99 * 0.06
    # The monitor has all steps but the traced one, and the ledger a sample of them.
    found = json.loads((tmp_path / "monitored" / "communication.json").read_text())
    first = found["workers"][0]
    exposed = 99 * (first["step_seconds"] - first["compute_seconds"])
    assert total.share("exposed") == pytest.approx(
        exposed / total.total_seconds, abs=TWO_POINTS
    )
    assert job.stdout.splitlines()[-1] == f"tfdp: {total}"
    tags = {
        value.tag
        for path in (tmp_path / "monitored" / "goodput").iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }
    assert tags == {f"goodput/{name}_share" for name in CLASSES}


def run_tfdp(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Runs a command, with its messages among its output."""
    return subprocess.run(
        [sys.executable, "-m", "tfdp", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )


def small_fit(
    *callbacks: Any, num_rows: int = 32, **options: Any
) -> keras.callbacks.History:
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    options = {"batch_size": 2, "verbose": 0, "epochs": 2} | options
    x = np.ones((num_rows, 2), "float32")
    return model.fit(x, x[:, :1], callbacks=list(callbacks), **options)


class Every(keras.callbacks.Callback):
    """Calls a function after each batch."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.act(batch)


def test_without_backups_and_launcher_there_is_no_ledger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_fit()
    assert training.FEATURE._latest is None
    assert not list(tmp_path.iterdir())


def test_a_job_without_backups_has_its_ledger_in_the_logs(
    tmp_path, monkeypatch, attempts
):
    launch = ledger.Launch.new(tmp_path)
    config: dict = {}
    launch.add_to(config)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert ledger.Launch.from_environment() == launch
    small_fit()
    small_fit()
    attempts()
    assert [path.name for path in tmp_path.iterdir()] == ["goodput.jsonl"]
    found = read(tmp_path)
    assert found.launched == launch.since
    assert found.seconds["again"] == 0
    assert goodput_of(launch) == str(found)
    assert goodput_of(ledger.Launch(launch.folder, ledger.Moment.now())) == ""


@pytest.mark.full
def test_a_ledger_is_written_about_once_a_second_and_not_in_each_step(
    tmp_path, monkeypatch
):
    written: list[float] = []
    append = ledger.LedgerFile.append

    def count(self, lines):
        written.append(time.monotonic())
        return append(self, lines)

    monkeypatch.setattr(ledger.LedgerFile, "append", count)
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups", save_freq=10**6)
    small_fit(Every(lambda batch: time.sleep(0.02)), backup, epochs=8)
    # After the first step, at the end of `fit`, and in between.
    between = [b - a for a, b in itertools.pairwise(written[:-1])]
    assert len(between) >= 2
    assert min(between) >= 1.0


def test_a_kill_loses_at_most_about_a_second(tmp_path):
    """What is on the disk is compared with what passed, after each step."""
    folder, lost, begins = tmp_path / "backups", [], []

    def compare(batch: int) -> None:
        begins.append(time.monotonic())
        time.sleep(0.05)
        if (tmp_path / "backups.goodput.jsonl").exists():
            *_, last = ledger.read(ledger.find(str(folder))[-1])
            lost.append(ledger.uptime() - json.loads(last)["up"])

    backup = tfdp.callbacks.BackupAndRestore(folder, save_freq=10**6)
    small_fit(Every(compare), backup, epochs=4)
    assert len(lost) > 50
    # It is written at the end of a step, however long that takes here.
    longest = max(b - a for a, b in itertools.pairwise(begins))
    assert max(lost) < 1.0 + longest + 0.5


def test_a_long_attempt_is_written_less_often(tmp_path):
    file = ledger.LedgerFile(str(tmp_path / "backups"), None)
    now = ledger.Moment.now()
    for age, interval in ((0, 1.0), (3600, 3.6), (10**6, 10.0)):
        since = ledger.Moment(now.time - age, now.up - age, now.boot)
        found = recorder.GoodputRecorder(file, None, since)
        found.write()
        assert found._due - found._at == pytest.approx(interval, rel=0.05)


def test_a_full_disk_loses_nothing_and_is_said_once(disk, capfd, attempts):  # noqa: F811
    """The ledger of a long `fit` misses no second once there is room again."""
    folder = disk / "backups"
    backup = tfdp.callbacks.BackupAndRestore(folder, save_freq=10**6)

    def act(batch: int) -> None:
        time.sleep(0.08)
        if batch == 60:
            (disk / "filler").unlink()

    class Fill(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            fill(disk)

    began = time.monotonic()
    small_fit(Fill(), Every(act), backup, num_rows=160, epochs=1)
    attempts()
    found = read(folder)
    assert found.total_seconds == pytest.approx(time.monotonic() - began, abs=1.0)
    assert found.seconds["unknown"] == 0
    assert found.num_damaged == 0
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "ledger" in line]
    assert "cannot be written (No space left on device); training continues" in said


def test_a_ledger_that_cannot_be_opened_is_said_once(tmp_path, capfd, attempts):
    (tmp_path / "backups.goodput.jsonl").symlink_to(tmp_path / "victim")
    small_fit(tfdp.callbacks.BackupAndRestore(tmp_path / "backups"))
    attempts()
    said = [line for line in capfd.readouterr().err.splitlines() if "ledger" in line]
    assert len(said) == 1
    assert not (tmp_path / "victim").exists()


def test_lines_after_a_torn_one_are_whole(tmp_path, attempts):
    path = tmp_path / "backups.goodput.jsonl"
    path.write_text('{"kind": "work", "time": 5')
    small_fit(tfdp.callbacks.BackupAndRestore(tmp_path / "backups"))
    attempts()
    found = read(tmp_path / "backups")
    assert found.num_damaged == 1
    assert found.seconds["step"] > 0


def test_each_directory_of_backups_has_its_own_ledger(tmp_path, attempts):
    for name in ("a", "b"):
        small_fit(tfdp.callbacks.BackupAndRestore(tmp_path / name))
    attempts()
    for name in ("a", "b"):
        assert read(tmp_path / name).num_restarts == 0
    # Backups are deleted with their directory, and the ledgers stay.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.goodput.jsonl",
        "b.goodput.jsonl",
    ]
    assert (tmp_path / "a.goodput.jsonl").stat().st_mode & 0o077 == 0


def test_a_job_of_two_fits_with_their_own_backups_has_the_time_of_both(
    tmp_path, monkeypatch, attempts
):
    logs = tmp_path / "logs"
    logs.mkdir()
    launch = ledger.Launch(str(logs), ledger.Moment.now())
    config: dict[str, Any] = {}
    launch.add_to(config)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    training.FEATURE._num_fits = 0
    monkeypatch.setattr(ledger.Moment, "of_process_start", lambda: launch.since)
    ends = []
    for name in ("a", "b"):
        small_fit(tfdp.callbacks.BackupAndRestore(tmp_path / name))
        ends.append(ledger.Moment.now().since(launch.since))
        time.sleep(0.5)
    attempts()
    elapsed = ledger.Moment.now().since(launch.since)
    parts = [read(tmp_path / name).total_seconds for name in ("a", "b")]
    assert sum(parts) == pytest.approx(elapsed, rel=0.05)
    # The later fit does not count the time of the earlier one as its start-up.
    assert parts[1] < elapsed - 0.9 * ends[0]
    assert ledger.find(str(logs))[1:] == [
        str(tmp_path / f"{name}.goodput.jsonl") for name in ("a", "b")
    ]
    (line,) = goodput_of(launch).splitlines()
    assert re.match(r"goodput \d+ %: \d+ % [a-z-]+", line)
    assert "restart" not in line


@pytest.mark.full
def test_a_mounted_volume_has_its_ledger_inside(disk, attempts):  # noqa: F811
    assert ledger.path_beside(str(disk)) == str(disk / "goodput.jsonl")
    small_fit(tfdp.callbacks.BackupAndRestore(disk))
    attempts()
    assert read(disk).seconds["step"] > 0


def test_a_model_without_a_strategy_has_a_ledger_too(tmp_path, attempts):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((32, 2), "float32")
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups", save_freq=1)
    options = {"epochs": 2, "verbose": 0, "callbacks": [backup]}
    model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), **options)
    attempts()
    seconds = read(tmp_path / "backups").seconds
    found = {name for name in ("step", "trace", "evaluation", "save") if seconds[name]}
    assert found == {"step", "trace", "evaluation", "save"}


@pytest.mark.full
def test_a_list_of_callbacks_that_is_used_twice_gets_the_ledger_once(tmp_path):
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((32, 2), "float32")
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups")
    given = keras.callbacks.CallbackList([backup], add_history=True, model=model)
    for _ in range(2):
        model.fit(x, x[:, :1], verbose=0, callbacks=given)
    found = [c for c in given.callbacks if isinstance(c, training._RecorderCallback)]
    assert len(found) == 1


@pytest.mark.full
def test_an_evaluation_within_a_callback_is_no_step(tmp_path, attempts):
    class Evaluate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            x = np.ones((4, 2), "float32")
            self.model.evaluate(x, x[:, :1], verbose=0)

    small_fit(
        Evaluate(), tfdp.callbacks.BackupAndRestore(tmp_path / "backups"), epochs=1
    )
    attempts()
    seconds = read(tmp_path / "backups").seconds
    assert seconds["evaluation"] > seconds["step"] + seconds["idle"]


@pytest.mark.full
def test_only_calls_that_trace_a_step_are_tracing(tmp_path, attempts):
    """Two models take turns, and the second fit of each has a step already."""
    x = np.ones((32, 2), "float32")
    models = []
    with tfdp.MirroredStrategy(["CPU:0"]).scope():
        for _ in range(2):
            models.append(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
            models[-1].compile("sgd", "mse", jit_compile=False)
    for model in models * 2:
        backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups", save_freq=100)
        model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[backup])
    attempts()
    lines = list(
        map(json.loads, ledger.read(ledger.find(str(tmp_path / "backups"))[-1]))
    )
    traced = {line["fit"] for line in lines if "trace" in line.get("seconds", {})}
    assert traced == {1, 2}


@pytest.mark.full
def test_a_fit_within_a_callback_is_no_step_of_the_outer_one(tmp_path, attempts):
    class Fit(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            small_fit(Every(lambda batch: time.sleep(0.01)), num_rows=64, epochs=1)

    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups", save_freq=10**6)
    small_fit(Fit(), backup)
    attempts()
    lines = list(
        map(json.loads, ledger.read(ledger.find(str(tmp_path / "backups"))[-1]))
    )
    assert max(line["last"] for line in lines if "last" in line) == 15
    found = read(tmp_path / "backups")
    assert found.seconds["again"] == 0
    assert found.seconds["idle"] > 2 * 32 * 0.01


def test_a_fit_that_fails_before_its_first_step_leaves_no_trace(tmp_path, attempts):
    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            raise scripted.Cut

    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups", save_freq=10**6)
    with pytest.raises(scripted.Cut):
        small_fit(Fails(), backup)
    assert not step_events.data_waits
    attempts()
    assert not list(tmp_path.iterdir())


def test_the_shares_for_tensorboard_are_those_of_the_file(tmp_path, attempts):
    given: list[tuple[Shares, Shares]] = []

    class Compare(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            made = training.FEATURE.recorder.shares()
            given.append((made, read(tmp_path / "backups")))

    board = keras.callbacks.TensorBoard(tmp_path / "board")
    backup = tfdp.callbacks.BackupAndRestore(tmp_path / "backups")
    small_fit(Compare(), board, backup, epochs=3)
    assert len(given) == 3
    assert all(made == found for made, found in given)
    (path,) = (tmp_path / "board" / "goodput").iterdir()
    events = [
        (event.step, value.tag)
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
    tags = [f"goodput/{name}_share" for name in CLASSES]
    assert sorted(events) == sorted(itertools.product(range(3), tags))


def test_without_tensorboard_the_ledger_is_all_there_is(
    tmp_path, attempts, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monitor = tfdp.callbacks.CommunicationMonitor(tmp_path / "monitor")
    small_fit(monitor, tfdp.callbacks.BackupAndRestore(tmp_path / "backups"))
    attempts()
    assert read(tmp_path / "backups").seconds["step"] > 0
    assert (tmp_path / "monitor").is_dir()
    assert not list((tmp_path / "monitor").rglob("*tfevents*"))


def test_deterministic_steps_have_no_clock_and_a_ledger(
    tmp_path, attempts, monkeypatch
):
    monkeypatch.setattr(random_seeds, "is_deterministic", lambda: True)
    active: list[list] = []
    look = Every(lambda batch: active.append(step_events.data_waits.active()))
    small_fit(look, tfdp.callbacks.BackupAndRestore(tmp_path / "backups"))
    attempts()
    assert active == [[]] * 32
    seconds = read(tmp_path / "backups").seconds
    assert all(seconds[name] > 0 for name in ("step", "trace", "save"))
