"""A run that was killed goes on exactly; what is damaged or foreign is named."""

from __future__ import annotations

import functools
import random
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint import bucket, interrupted_fit
from tests.harness.interrupted import Layout, Result, run
from tests.harness.tiers import full
from tfdp.communication.coordination.preemption import PREEMPTED, SAVE_SIGNAL

ONE_PROCESS, TWO_WORKERS, TWO_BY_TWO = Layout(1, 2), Layout(2, 1), Layout(2, 2)
FOUR_DEVICES = Layout(1, 4)
KILLED = -signal.SIGKILL


def train(layout: Layout, folder: Path, **arguments) -> Result:
    return run(layout, interrupted_fit.fit, folder, arguments)


@functools.cache
def _undisturbed(layout: Layout, arguments: frozenset) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return train(layout, Path(folder), **dict(arguments))


@pytest.fixture
def undisturbed() -> Callable[..., Result]:
    """Trains without a backup and without a disturbance, once for all tests."""
    return lambda layout, **more: _undisturbed(layout, frozenset(more.items()))


def assert_same(found: Result, wanted: Result) -> None:
    """Bit for bit: weights, history, epochs."""
    assert found.weights is not None, found.output[-3000:]
    assert wanted.weights is not None, wanted.output[-3000:]
    assert found.epochs == wanted.epochs
    assert found.history == wanted.history
    for name, value in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], value)


def killed_and_resumed(layout: Layout, folder: Path, seed: int, **arguments) -> Result:
    """Kills a drawn worker at a drawn step, and starts all again."""
    draw = random.Random(f"{seed} {layout.name}")
    directory = str(folder / "backups")
    step = draw.randrange(4, 4 * interrupted_fit.STEPS_PER_EPOCH)
    rank = draw.randrange(layout.num_workers)
    kill: dict = {"step": step, "at": rank, "number": int(signal.SIGKILL)}
    freq = arguments.get("save_freq", "epoch")
    freq = interrupted_fit.STEPS_PER_EPOCH if freq == "epoch" else freq
    # The backup of a step begins after the callback that kills.
    if last := (step - 1) // freq * freq:
        kill["backup"] = f"{directory}/step-{last}/index.json"
    first = train(layout, folder, directory=directory, kill=kill, **arguments)
    assert first.codes[rank] == KILLED, first.output[-3000:]
    assert first.weights is None
    return train(layout, folder, directory=directory, **arguments)


# What is undisturbed is trained once for the files that share a process.
PROCESS_GROUP = "backups"
pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.full
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(undisturbed, tmp_path):
    found = killed_and_resumed(TWO_WORKERS, tmp_path, seed=1, save_freq=3)
    assert_same(found, undisturbed(TWO_WORKERS))
    assert not (tmp_path / "backups").exists()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("data", ["dataset", "arrays"])
@pytest.mark.parametrize(
    "layout", [ONE_PROCESS, TWO_WORKERS, TWO_BY_TWO], ids=lambda x: x.name
)
def test_a_killed_run_goes_on_exactly_wherever_it_was_killed(
    layout, data, seed, undisturbed, tmp_path
):
    save_freq = ("epoch", 1, 3, 7, 2, 5)[seed]
    found = killed_and_resumed(layout, tmp_path, seed, save_freq=save_freq, data=data)
    assert_same(found, undisturbed(layout, data=data))


@pytest.mark.parametrize("data", [full("map"), full("rows"), full("files")])
def test_a_killed_run_goes_on_exactly_where_workers_read_their_own_rows(
    data, undisturbed, tmp_path
):
    found = killed_and_resumed(TWO_WORKERS, tmp_path, 3, save_freq=3, data=data)
    assert_same(found, undisturbed(TWO_WORKERS, data=data))


@pytest.mark.full
@pytest.mark.parametrize("layout", [ONE_PROCESS, TWO_WORKERS], ids=lambda x: x.name)
@pytest.mark.parametrize("stage", [2, 3])
def test_accumulated_gradients_and_parameters_that_are_sharded_go_on_too(
    layout, stage, undisturbed, tmp_path
):
    found = killed_and_resumed(layout, tmp_path, seed=2, save_freq=1, stage=stage)
    assert_same(found, undisturbed(layout, stage=stage))


@pytest.mark.parametrize(
    "layout", [full(TWO_BY_TWO), full(ONE_PROCESS)], ids=lambda x: x.name
)
def test_errors_of_compressed_gradients_go_on_too(layout, undisturbed, tmp_path):
    options = {"compression": "int8", "units": 200}
    found = killed_and_resumed(layout, tmp_path, seed=4, save_freq=1, **options)
    assert_same(found, undisturbed(layout, **options))
    plain = undisturbed(layout, units=200)
    assert any(
        not np.array_equal(value, found.weights[name])
        for name, value in plain.weights.items()
    )


@pytest.mark.full
def test_a_run_goes_on_on_another_number_of_replicas_as_one_device_would(
    undisturbed, tmp_path
):
    check_on_other_replicas(Layout(2, 1), undisturbed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("after", [Layout(1, 3), Layout(1, 1)], ids=lambda x: x.name)
def test_a_run_goes_on_on_any_number_of_replicas(after, undisturbed, tmp_path):
    check_on_other_replicas(after, undisturbed, tmp_path)


@pytest.mark.parametrize(
    ("before", "stages", "after"),
    [
        full(Layout(2, 1), (3, 1), Layout(1, 1)),
        full(FOUR_DEVICES, (3, 2), ONE_PROCESS),
        full(ONE_PROCESS, (3, 3), FOUR_DEVICES),
        full(ONE_PROCESS, (1, 3), TWO_WORKERS),
        full(TWO_BY_TWO, (2, 3), ONE_PROCESS),
    ],
)
def test_sharded_parameters_go_on_in_another_stage_on_other_replicas(
    before, stages, after, undisturbed, tmp_path
):
    check_on_other_replicas(after, undisturbed, tmp_path, before, stages)


def check_on_other_replicas(
    after: Layout,
    undisturbed: Callable,
    tmp_path: Path,
    before: Layout = FOUR_DEVICES,
    stages: tuple[int, int] = (1, 1),
) -> None:
    options = {"everything": False, "epochs": 21, "learning_rate": 0.01}
    directory = str(tmp_path / "backups")
    # Between two epochs and between the micro-batches of an update. What waits may not
    # be whole in one stage and sharded in the other: then between two updates.
    save_freq = 7 if (stages[0] > 1) == (stages[1] > 1) else 6
    kill: dict = {"step": 8, "at": 0, "number": int(signal.SIGKILL)}
    kill["backup"] = f"{directory}/step-{save_freq}/index.json"
    first = {"save_freq": save_freq, "kill": kill, "stage": stages[0]}
    train(before, tmp_path, directory=directory, **first, **options)
    second = {"save_freq": 1000, "stage": stages[1]}
    found = train(after, tmp_path, directory=directory, **second, **options)
    wanted = undisturbed(Layout(1, 1), **options)
    assert found.weights is not None, found.output[-3000:]
    assert "tfdp: resumed at step" in found.output
    assert found.epochs == wanted.epochs
    for name, value in wanted.weights.items():
        error = np.abs(found.weights[name] - value).max()
        assert error <= 1e-5 * max(np.abs(value).max(), 1e-3), (name, error)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=2e-5, atol=1e-6)


@pytest.mark.full
def test_a_crash_between_the_parts_and_the_index_leaves_the_backup_before(
    undisturbed, tmp_path
):
    directory = str(tmp_path / "backups")
    options = {"directory": directory, "save_freq": 3}
    crashed = train(TWO_WORKERS, tmp_path, crash_in_save=3, **options)
    assert crashed.codes[0] == KILLED
    assert len(list((tmp_path / "backups").glob("step-*/index.json"))) == 2
    assert len(list((tmp_path / "backups").glob("step-*"))) == 3
    assert_same(train(TWO_WORKERS, tmp_path, **options), undisturbed(TWO_WORKERS))


@pytest.mark.parametrize(
    "layout", [full(ONE_PROCESS), full(TWO_WORKERS), full(TWO_BY_TWO)]
)
def test_a_worker_that_is_killed_between_two_puts_goes_on_exactly(
    layout, undisturbed, tmp_path
):
    store = tmp_path / "store"
    store.mkdir()
    directory, rank = "bucket://runs/mine", layout.num_workers - 1
    options = {"directory": directory, "save_freq": 3, "bucket": str(store)}
    die = {"backup": "step-9", "rank": rank}
    killed = train(layout, tmp_path, die_at_put=die, **options)
    assert killed.codes[rank] == KILLED, killed.output[-3000:]
    left = list(bucket.objects(store))
    names = {name.split("/")[2] for name in left if "/.run-" not in name}
    assert names == {"step-3", "step-6", "step-9"}
    assert not [name for name in left if name.endswith("step-9/index.json")]
    assert_same(train(layout, tmp_path, **options), undisturbed(layout))
    assert bucket.objects(store) == {}


@pytest.mark.parametrize(
    ("number", "step", "rank"),
    [
        (signal.SIGTERM, 0, None),
        full(signal.SIGTERM, 6, 1),
        full(SAVE_SIGNAL, 6, 1),
    ],
)
def test_preempted_workers_save_and_exit_with_a_code_of_their_own(
    number, step, rank, undisturbed, tmp_path
):
    options = {"directory": str(tmp_path / "backups"), "save_freq": 1000}
    kill = {"step": step, "at": rank, "number": int(number)}
    first = train(TWO_WORKERS, tmp_path, kill=kill, **options)
    assert first.codes == (PREEMPTED, PREEMPTED), first.output[-3000:]
    assert "Run the same command to resume" in first.output
    assert_same(train(TWO_WORKERS, tmp_path, **options), undisturbed(TWO_WORKERS))


@pytest.mark.full
def test_sigterm_at_the_very_end_of_fit_leaves_its_backups(undisturbed, tmp_path):
    options = {"directory": str(tmp_path / "backups"), "save_freq": "epoch"}
    kill = {"step": -1, "at": None, "number": int(signal.SIGTERM)}
    first = train(TWO_WORKERS, tmp_path, kill=kill, **options)
    assert first.codes == (-signal.SIGTERM,) * 2, first.output[-3000:]
    assert (tmp_path / "backups").exists()
    assert_same(train(TWO_WORKERS, tmp_path, **options), undisturbed(TWO_WORKERS))
    assert not (tmp_path / "backups").exists()


def test_sigterm_before_fit_ends_a_worker_whose_strategy_is_there(tmp_path):
    action, options = interrupted_fit.asked_to_end_before_fit, {"folder": str(tmp_path)}
    found = run(TWO_WORKERS, action, tmp_path, options)
    assert found.codes == (-signal.SIGTERM, -signal.SIGTERM), found.output[-3000:]


@pytest.mark.parametrize("rank", [1, full(0)])
def test_sigterm_while_a_worker_joins_its_cluster_is_not_lost(rank, tmp_path):
    action, options = interrupted_fit.asked_to_end_while_joining, {"at": rank}
    found = run(TWO_WORKERS, action, tmp_path, options, deadline_seconds=40.0)
    assert found.codes[rank] == -signal.SIGTERM, found.output[-3000:]


def test_every_worker_raises_what_is_wrong_with_the_directory(tmp_path):
    options = {"everything": False, "epochs": 1}
    file = tmp_path / "file"
    file.write_text("")
    blocked = train(TWO_WORKERS, tmp_path, directory=str(file / "below"), **options)
    assert [answer["error"] for answer in blocked.answers] == ["OSError"] * 2
    assert not any(answer.get("history") for answer in blocked.answers)


@pytest.mark.full
def test_every_worker_refuses_a_backup_of_another_model(tmp_path):
    options = {"directory": str(tmp_path / "backups"), "everything": False}
    train(ONE_PROCESS, tmp_path, epochs=1, delete_at_end=False, **options)
    other = train(TWO_WORKERS, tmp_path, units=7, **options)
    assert [answer["error"] for answer in other.answers] == ["ValueError"] * 2
    for answer in other.answers:
        assert "it belongs to another model" in answer["text"]
