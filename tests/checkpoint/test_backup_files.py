"""Backups are kept, chosen and refused; callbacks and generators are remembered."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdp
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
from tfdp.callbacks import BackupAndRestore
from tfdp.checkpoint import index_file, replica_state, writer
from tfdp.checkpoint.backups import Backups
from tfdp.checkpoint.callback_state import from_json, to_json
from tfdp.checkpoint.random_state import random_states, set_random_states
from tfdp.communication.coordination.preemption import (
    PREEMPTED,
    PreemptionNotice,
    PreemptionWatch,
)
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.base.temporary import temporary_name

pytestmark = pytest.mark.slow

PLAIN = {"shuffle": False}


def names(folder: Path) -> list[str]:
    """Names of what is in a directory, but for the claim of the last run."""
    return sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(".run-")
    )


class OtherRun(keras.callbacks.Callback):
    """Another job that begins to use the directory of backups after a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            Backups(str(self.folder), 1, WorkerGroup(0, 1)).prepare()


def cut_run(folder: Path, *callbacks: Any, step: int = 7, **options: Any) -> None:
    """Trains until a step is saved, and is cut before the next one is."""
    options = {"save_freq": 1} | options
    backup = BackupAndRestore(folder, **options)
    with pytest.raises(PowerCut):
        fit(arrays(**PLAIN), backup, *callbacks, Cut(step + 1))


@pytest.fixture(scope="module")
def of_step_7(tmp_path_factory) -> Path:
    """The backups of a run that was cut after step 7; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("cut") / "backups"
    cut_run(folder)
    return folder


@pytest.fixture
def backups(of_step_7, tmp_path) -> Path:
    """A copy of the backups of steps 5 to 7."""
    return shutil.copytree(of_step_7, tmp_path / "backups")


@pytest.fixture(scope="module")
def undisturbed() -> tuple:
    """Weights and history of a run that nothing cut, and that saved nothing."""
    return fit(arrays(**PLAIN))


def damage(folder: Path) -> None:
    """Changes one byte of the data of a backup."""
    path = next(folder.glob("data-*/*.data"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def change_index(folder: Path, **content: Any) -> None:
    """Writes an index anew, with a checksum that fits."""
    body = json.loads((folder / "index.json").read_text())
    body["format"] = content.pop("format", body["format"])
    body["content"].update(content)
    body["checksum"] = index_file._checksum(body["content"])
    (folder / "index.json").write_text(json.dumps(body))


def test_the_newest_backups_are_kept_for_the_user_alone(of_step_7, tmp_path):
    cut_run(tmp_path, step=3, keep=2)
    assert names(tmp_path) == ["step-2", "step-3"]
    assert names(of_step_7) == ["step-5", "step-6", "step-7"]
    assert of_step_7.stat().st_mode & 0o077 == 0


def test_backups_are_deleted_when_fit_is_through_and_nothing_else_is(backups):
    (backups / "notes").write_text("mine")
    fit(arrays(**PLAIN), BackupAndRestore(backups))
    assert names(backups) == ["notes"]


def test_a_run_whose_directory_another_has_begun_to_use_stops_and_deletes_nothing(
    tmp_path,
):
    backup = BackupAndRestore(tmp_path, 2)
    with pytest.raises(ValueError, match="another run has begun to write backups"):
        fit(arrays(**PLAIN), OtherRun(tmp_path), backup)
    assert names(tmp_path) == []
    cut_run(tmp_path)
    fit(arrays(**PLAIN), BackupAndRestore(tmp_path, 100), OtherRun(tmp_path))
    assert len(names(tmp_path)) == 3


def test_a_claim_that_somebody_has_removed_stops_no_run(tmp_path):
    def tidy(batch: int, logs: Any = None) -> None:
        for path in tmp_path.glob(".run-*"):
            path.unlink()

    cleaner = keras.callbacks.LambdaCallback(on_train_batch_end=tidy)
    backup = BackupAndRestore(tmp_path, 2, delete_at_end=False)
    fit(arrays(**PLAIN), cleaner, backup)
    assert len(names(tmp_path)) == 3


def test_backups_that_are_not_deleted_let_a_run_that_is_over_end_at_once(tmp_path):
    backup = BackupAndRestore(tmp_path, delete_at_end=False)
    first = fit(arrays(**PLAIN), backup)
    assert set(names(tmp_path)) == {f"step-{STEPS * e}" for e in (1, 2, 3)}
    watch = Cut()
    again = fit(arrays(**PLAIN), BackupAndRestore(tmp_path, delete_at_end=False), watch)
    assert watch.seen == []
    assert_same(again, first)
    more = fit(arrays(**PLAIN), BackupAndRestore(tmp_path), epochs=EPOCHS + 1)
    assert more[2] == list(range(EPOCHS + 1))


def test_a_probe_that_a_killed_start_has_left_is_no_backup_and_is_removed(tmp_path):
    killed = temporary_name("probe").replace(f"-{os.getpid()}-", "-0-")
    running = temporary_name("probe")
    for name in (killed, running):
        (tmp_path / f".{name}").write_text("")
    watch = Cut()
    fit(arrays(**PLAIN), BackupAndRestore(tmp_path, delete_at_end=False), watch)
    assert watch.seen[0] == (0, 0)
    backups = [f"step-{STEPS * epoch}" for epoch in (1, 2, 3)]
    assert sorted(names(tmp_path)) == sorted([f".{running}", *backups])


def test_a_damaged_backup_is_named_and_the_one_before_is_taken(backups, undisturbed):
    damage(backups / "step-7")
    watch = Cut()
    with pytest.warns(UserWarning, match=r"'step-6', since newer backups are damaged"):
        found = fit(arrays(**PLAIN), BackupAndRestore(backups, 1), watch)
    assert watch.seen[0] == (1, 1)
    assert_same(found, undisturbed)


def test_a_run_that_was_cut_after_the_last_step_of_an_epoch_says_so(
    backups, undisturbed, capfd
):
    shutil.rmtree(backups / "step-6")
    shutil.rmtree(backups / "step-7")
    assert_same(fit(arrays(**PLAIN), BackupAndRestore(backups)), undisturbed)
    assert "resumed at the end of epoch 1, from" in capfd.readouterr().err


def test_the_end_of_an_epoch_is_told_where_its_last_execution_is_shorter(
    tmp_path, capfd
):
    # Keras counts the 5 batches of the epoch as 3 executions of 2.
    def train(*callbacks: keras.callbacks.Callback) -> None:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
        x, backup = np.ones((10, 1), "float32"), BackupAndRestore(tmp_path, 1)
        model.fit(x, x, batch_size=2, epochs=2, callbacks=[*callbacks, backup])

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(keras.callbacks.LambdaCallback(on_epoch_end=stop))
    train()
    assert "resumed at the end of epoch 1, from" in capfd.readouterr().err


def test_a_damaged_backup_is_set_aside_and_not_pruned_before_older_ones(backups):
    damage(backups / "step-7")
    with pytest.warns(UserWarning, match="damaged"):
        cut_run(backups, step=1, keep=1)
    assert names(backups) == ["step-7", "step-7.damaged"]


def test_if_no_backup_is_whole_nothing_is_loaded_and_nothing_deleted(backups):
    before = names(backups)
    for name in before:
        damage(backups / name)
    with pytest.raises(ValueError, match=r"All backups in .* are damaged.*step-6: "):
        fit(arrays(**PLAIN), BackupAndRestore(backups, 1))
    assert names(backups) == before


def test_what_a_save_left_that_did_not_end_is_no_backup(backups):
    os.unlink(backups / "step-7" / "index.json")
    watch = Cut(1)
    with pytest.raises(PowerCut):
        fit(arrays(**PLAIN), BackupAndRestore(backups, 1), watch)
    assert watch.seen == [(1, 1)]


def test_a_full_disk_ends_training_and_leaves_the_backups(backups, monkeypatch):
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_shards", full)
        with pytest.raises(OSError, match="No space left"):
            fit(arrays(**PLAIN), BackupAndRestore(backups, 1))
    assert "step-7" in names(backups)
    cut_run(backups, step=1)
    assert "step-8" in names(backups)


def test_a_directory_that_cannot_be_is_said_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    watch = Cut()
    with pytest.raises(ValueError, match="there is a file of that name"):
        fit(arrays(**PLAIN), BackupAndRestore(tmp_path / "file"), watch)
    with pytest.raises(OSError, match="Not a directory"):
        fit(arrays(**PLAIN), BackupAndRestore(tmp_path / "file" / "below"), watch)
    assert watch.seen == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "it has format 3, and this tfdp reads up to 2"),
        ({"run": None}, "it is a checkpoint without the state of a run"),
    ],
)
def test_a_backup_that_is_none_or_is_newer_is_refused(change, message, backups):
    change_index(backups / "step-7", **change)
    with pytest.raises(ValueError, match=message):
        fit(arrays(**PLAIN), BackupAndRestore(backups, 1))


def test_a_backup_of_a_newer_tfdp_is_refused_and_its_version_named(backups):
    newest = backups / "step-7"
    run = index_file.load_index(str(newest)).run
    change_index(newest, run={**run, "format": 2}, versions={"tfdp": "9.1"})
    with pytest.raises(ValueError, match=r"made by tfdp 9\.1, which is newer"):
        fit(arrays(**PLAIN), BackupAndRestore(backups, 1))


def test_a_backup_of_another_run_or_model_is_refused(backups):
    with pytest.raises(ValueError, match="another run, in which `batch_size` was 4"):
        fit(arrays(**PLAIN, batch_size=5), BackupAndRestore(backups, 1))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    with pytest.raises(ValueError, match=r"it belongs to another model\. '"):
        model.fit(**arrays(**PLAIN), callbacks=[BackupAndRestore(backups, 1)])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(ValueError, match="another run, in which `optimizer` was"):
        model.fit(**arrays(**PLAIN), callbacks=[BackupAndRestore(backups, 1)])
    model = build()
    model.compile("adam", "mse", metrics=["mse"], jit_compile=False)
    with pytest.raises(ValueError, match="metrics of its epoch differ: 'mean_abs"):
        model.fit(**arrays(**PLAIN), callbacks=[BackupAndRestore(backups, 1)])
    guarded = [BackupAndRestore(backups, 1), tfdp.callbacks.SpikeGuard()]
    with pytest.raises(ValueError, match="without `SpikeGuard`, which this run has"):
        fit(arrays(**PLAIN), *guarded, make_model=build)
    run = index_file.load_index(str(backups / "step-7")).run
    run["facts"]["features"] = ["`SpikeGuard`"]
    change_index(backups / "step-7", run=run)
    with pytest.raises(ValueError, match="with `SpikeGuard`, which this run lacks"):
        fit(arrays(**PLAIN), BackupAndRestore(backups, 1))
    assert names(backups) == ["step-5", "step-6", "step-7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"directory": ""}, "`directory` must be the path"),
        ({"save_freq": "batch"}, "`save_freq` must be"),
        ({"save_freq": 0}, "`save_freq` must be"),
        ({"save_freq": True}, "`save_freq` must be"),
        ({"keep": 0}, "`keep` must be"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        BackupAndRestore(**({"directory": "backups"} | arguments))


def test_two_backups_in_one_fit_are_refused(tmp_path):
    several = [BackupAndRestore(tmp_path / name) for name in "ab"]
    with pytest.raises(ValueError, match="Give `fit` one"):
        fit(arrays(**PLAIN), *several)


class Counter(keras.callbacks.Callback):
    """A callback of the user's, with a state."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.zeros(2, "int32")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += (1, 2)

    def get_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_callbacks_are_remembered(tmp_path):
    def chosen(folder: Path) -> list[Any]:
        callbacks = keras.callbacks
        return [
            Counter(),
            callbacks.EarlyStopping("loss", patience=4, restore_best_weights=True),
            callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=9.0),
            # It multiplies when an epoch begins, not when it goes on.
            callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
            callbacks.ModelCheckpoint(str(folder / "m.keras"), "loss"),
        ]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    own = chosen(tmp_path / "a")
    undisturbed = fit(arrays(**PLAIN), *own, Cut())
    cut_run(tmp_path / "backups", *chosen(tmp_path / "b"), step=STEPS * 2 + 2)
    again = chosen(tmp_path / "b")
    backup = BackupAndRestore(tmp_path / "backups", 1)
    found = fit(arrays(**PLAIN), *again, backup, Cut())
    assert_same(found, undisturbed)
    assert again[0].count.tolist() == own[0].count.tolist()
    for one, other in zip(again[1:], own[1:], strict=True):
        for name in ("best", "wait", "best_epoch", "cooldown_counter"):
            assert getattr(one, name, None) == getattr(other, name, None), name


def test_a_run_that_had_stopped_early_does_not_go_on(tmp_path):
    def stopping() -> Any:
        return keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=9.0, restore_best_weights=True
        )

    undisturbed = fit(arrays(**PLAIN), stopping())
    kept = BackupAndRestore(tmp_path, delete_at_end=False)
    fit(arrays(**PLAIN), stopping(), kept)
    watch = Cut()
    found = fit(arrays(**PLAIN), stopping(), BackupAndRestore(tmp_path), watch)
    assert watch.seen == []
    assert_same(found, undisturbed)


def test_a_run_that_had_stopped_within_an_epoch_stops_there_again(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == STEPS + 2:
                self.model.stop_training = True

    wanted = fit(arrays(**PLAIN), Stop(), BackupAndRestore(tmp_path / "none"))
    for _ in range(2):
        kept = BackupAndRestore(tmp_path / "kept", 1, delete_at_end=False)
        assert_same(fit(arrays(**PLAIN), Stop(), kept), wanted)


def test_a_callback_that_changes_the_working_directory_moves_no_backup(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    move = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: os.chdir(tmp_path / "elsewhere")
    )
    cut_run(Path("backups"), move)
    assert names(tmp_path / "backups") == ["step-5", "step-6", "step-7"]
    assert names(tmp_path / "elsewhere") == []


@pytest.mark.full
def test_the_next_fit_begins_with_its_own_first_epoch(backups, undisturbed):
    model = build()
    found = fit(arrays(**PLAIN), BackupAndRestore(backups), make_model=lambda _: model)
    assert_same(found, undisturbed)
    options = arrays(**PLAIN) | {"verbose": 0}
    assert model.fit(**options, epochs=2).epoch == [0, 1]


def test_random_generators_go_on():
    keras.utils.set_random_seed(4)
    keras.random.normal((2,))
    states = json.loads(json.dumps(random_states()))

    def drawn() -> list:
        own = [random.random(), np.random.normal(), *keras.random.normal((2,)).numpy()]
        return [float(value) for value in own]

    wanted = drawn()
    set_random_states(states)
    assert drawn() == wanted


def test_values_come_back_as_they_were():
    values = {"a": [1, 2.5, None, True], 3: {"b": np.float32(0.1)}, "n": float("inf")}
    values[1, (2,)] = (3, [4])
    found = from_json(json.loads(json.dumps(to_json(values))))
    assert found == values
    assert isinstance(found[3]["b"], np.float32)
    array = np.arange(6, dtype="int16").reshape(2, 3)
    np.testing.assert_array_equal(from_json(to_json(array)), array)
    with pytest.raises(TypeError, match="must be numbers, strings"):
        to_json(object())


def test_a_backup_can_be_restored_as_a_checkpoint(of_step_7):
    model = build()
    tfdp.checkpoint.restore(model, of_step_7 / "step-7")
    assert int(model.optimizer.iterations) == 7


@pytest.mark.parametrize(("merge", "total"), [("sum", 7), ("max", 4), ("min", 1)])
def test_one_replica_takes_what_several_had_together(merge, total):
    start = {"sum": 0, "max": -9, "min": 9}[merge]
    variable = keras.Variable(np.full((2, 1), start, "float32"))
    item = replica_state.PerReplicaVariable("m", variable, merge)
    tensors = replica_state.per_replica_tensors(
        [item], replica_state.LocalReplicas(), 3
    )
    assert [tensor.name for tensor in tensors] == [f"m/replica{r}" for r in range(3)]
    for tensor, value in zip(tensors, (1, 2, 4), strict=True):
        for shard in tensor.local_shards:
            shard.write(np.full(2, value, "float32"))
    assert variable.numpy().tolist() == [[total], [total]]


def test_each_replica_takes_its_own_value_where_they_are_as_many():
    variable = keras.Variable(np.zeros(2, "float32"))
    item = replica_state.PerReplicaVariable("m", variable)
    second = replica_state.LocalReplicas(first=1, num_local=1, count=3)
    tensors = replica_state.per_replica_tensors([item], second)
    assert [len(tensor.local_shards) for tensor in tensors] == [0, 1, 0]
    tensors[1].local_shards[0].write(np.array([1, 2], "float32"))
    assert tensors[1].owned_shards[0].read().tolist() == [1, 2]
    replica_state.zero_local_values(variable, second)
    assert variable.numpy().tolist() == [0, 0]


class Terminate(keras.callbacks.Callback):
    """Is told at a step that the machine will be taken away."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.count = step, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.count == self.step:
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_saves_and_exits_with_a_code_of_its_own(undisturbed, tmp_path, capfd):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        fit(arrays(**PLAIN), Terminate(7), BackupAndRestore(tmp_path))
    assert ended.value.code == PREEMPTED
    assert signal.getsignal(signal.SIGTERM) is before
    assert "saved training at step 7" in capfd.readouterr().err
    assert "step-7" in names(tmp_path)
    change_index(tmp_path / "step-7", versions={"oneDNN": "somewhere else"})
    watch = Cut()
    found = fit(arrays(**PLAIN), watch, BackupAndRestore(tmp_path))
    assert watch.seen[0] == (1, 2)
    said = capfd.readouterr().err
    assert "tfdp: resumed at step 3 of epoch 2, from " in said
    assert "the last digits differ from those of a run without interruption" in said
    assert_same(found, undisturbed)


def test_a_notice_that_came_when_all_was_done_is_passed_on():
    got = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    try:
        notice = PreemptionNotice()
        notice.listen()
        signal.raise_signal(signal.SIGTERM)
        assert notice.is_received
        assert not got
        notice.stop()
        assert got
    finally:
        signal.signal(signal.SIGTERM, before)


class Pair:
    """The group of two workers, of which the other says what it is told to."""

    rank, num_workers = 0, 2

    def __init__(self, other: list) -> None:
        self.other, self.count = other, 0

    def all_gather(self, topic: str, value: Any = "") -> list[Any]:
        self.count += 1
        return [value, self.other]


def test_workers_ask_each_other_for_notices_more_and_more_seldom():
    worker_group = Pair([False, 1000.0, []])
    watch = PreemptionWatch(PreemptionNotice(), worker_group)
    watch._rate = lambda step: 1000.0
    assert not any(watch.any_worker_notified(step) for step in range(1, 1001))
    assert worker_group.count <= 12
    worker_group.other = [True, 1000.0, []]
    assert watch.any_worker_notified(1001, must_gather=True)
