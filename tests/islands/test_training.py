"""`tfdp run --islands`: DiLoCo on workers that are jobs of their own."""

from __future__ import annotations

import collections.abc
import json
import os
import pathlib
import signal
import subprocess

import keras
import numpy as np
import pytest

from tests.cli.launcher import Launcher
from tests.harness import common
from tests.harness.tiers import full
from tests.harness.timing import wait_until
from tfdp.communication.cluster import free_ports

pytestmark = pytest.mark.processes
SCRIPT = str(pathlib.Path(__file__).with_name("train.py"))
DEADLINE_SECONDS = 120.0


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def arguments(epochs: int = 2, seconds: float = 0.0, backup: str = "", **more) -> str:
    return json.dumps({"epochs": epochs, "seconds": seconds, "backup": backup, **more})


def ended(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    return process.returncode, output


def weights(folder: pathlib.Path, name: str) -> list[np.ndarray]:
    with np.load(folder / f"{name}.npz") as file:
        return [file[key] for key in file.files]


def history(folder: pathlib.Path, index: int) -> dict:
    return json.loads((folder / f"history-{index}.json").read_text())


def steps(folder: pathlib.Path, index: int) -> list[tuple[int, float]]:
    """The process and the time of each step of an island."""
    path = folder / f"steps-{index}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), float(at)) for pid, at in map(str.split, lines)]


def wait_for_steps(folder: pathlib.Path, index: int, count: int) -> int:
    """Waits until an island has made so many steps; returns its process."""

    def made() -> list[tuple[int, float]]:
        found = steps(folder, index)
        return found if len(found) >= count else []

    what = f"{count} steps of island {index}"
    return wait_until(made, what, DEADLINE_SECONDS)[-1][0]


def expected(first: list[np.ndarray]) -> list[np.ndarray]:
    """Nodes on one device that are brought together by hand."""
    from tests.islands.train import EPOCHS, NUM_BATCHES, SYNC_EVERY, data, outer
    from tests.local_steps.cases_diloco import Nodes

    nodes = Nodes(2, first, outer())
    x, y = data()
    for _ in range(EPOCHS):
        for number in range(1, NUM_BATCHES + 1):
            rows = slice((number - 1) * common.BATCH_SIZE, number * common.BATCH_SIZE)
            nodes.step(x[rows], y[rows])
            if number % SYNC_EVERY == 0 or number == NUM_BATCHES:
                nodes.meet([0, 1, 2, 3])
    return nodes.models[0].get_weights()


def of_one_machine(launcher: Launcher) -> tuple[int, str]:
    return ended(launcher.start("-n", "2", "--islands", SCRIPT, arguments()))


def start_on_two_machines(launcher: Launcher, *args: str, devices: int = 1) -> list:
    """Starts a launcher with one island for each of two arguments of the script."""
    secret = launcher.folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    launcher.environment["TFDP_JOB_SECRET_FILE"] = str(secret)
    (port,) = free_ports(1)
    line = ["-n", "1", "-D", str(devices), "--islands", "--hub", f"127.0.0.1:{port}"]
    line += ["--num-islands", "2", "--first-island"]
    return [
        launcher.start(*line, str(index), SCRIPT, each)
        for index, each in enumerate(args)
    ]


def of_two_machines(launcher: Launcher) -> tuple[int, str]:
    """Two launchers, with two devices in each island, which shard and scale."""
    each = arguments(shards=True)
    both = start_on_two_machines(launcher, each, each, devices=2)
    codes, outputs = zip(*map(ended, both), strict=True)
    return max(codes), "".join(outputs)


@pytest.mark.parametrize(
    ("run", "devices"), [(of_one_machine, 1), full(of_two_machines, 2)]
)
def test_islands_equal_nodes_that_are_brought_together_by_hand(launcher, run, devices):
    code, output = run(launcher)
    assert code == 0, output
    folder = launcher.folder
    for own, other in zip(
        weights(folder, "last-0"), weights(folder, "last-1"), strict=True
    ):
        np.testing.assert_array_equal(own, other)
    wanted = expected(weights(folder, "first"))
    for own, value in zip(weights(folder, "last-0"), wanted, strict=True):
        np.testing.assert_allclose(own, value, atol=1e-5)
    both = [history(folder, index) for index in range(2)]
    assert both[0]["replicas"] == devices
    assert both[0]["islands"] == [2, 2]
    # What is evaluated are the common weights, of all rows.
    assert both[0]["val_loss"] == both[1]["val_loss"]
    assert both[0]["loss"] != both[1]["loss"]
    model = keras.models.load_model(folder / "model.keras")
    for own, value in zip(model.get_weights(), weights(folder, "last-0"), strict=True):
        np.testing.assert_array_equal(own, value)


@pytest.mark.full
def test_an_island_that_is_killed_stops_no_other_and_comes_back(launcher):
    options = arguments(epochs=5, seconds=0.1, backup="backups", waits_at=40)
    process = launcher.start(
        "-n", "2", "--islands", "--max-restarts", "1", SCRIPT, options
    )
    folder = launcher.folder
    killed = wait_for_steps(folder, 1, 8)
    os.kill(killed, signal.SIGKILL)
    code, output = ended(process)
    assert code == 0, output
    assert "island 1 was killed by SIGKILL" in output
    assert "it starts again in 1 s (restart 1 of 1), and the others continue" in output
    own = steps(folder, 0)
    assert len({pid for pid, _ in own}) == 1
    assert len(own) == 55  # no inner step is lost
    again = [pid for pid, _ in steps(folder, 1) if pid != killed]
    # It goes on with its own position, from what all have in common.
    assert 0 < len(again) < 55
    assert "[worker 1] tfdp: resumed at step" in output
    assert 2 in history(folder, 1)["islands"]
    launcher.assert_nothing_is_left(within_seconds=5.0)


@pytest.mark.full
def test_an_island_that_is_lost_for_good_is_told_by_the_exit_code(launcher):
    process = launcher.start("-n", "2", "--islands", SCRIPT, arguments(3, 0.1))
    os.kill(wait_for_steps(launcher.folder, 0, 4), signal.SIGKILL)
    code, output = ended(process)
    assert code == 128 + signal.SIGKILL
    assert "it does not start again, and the others continue" in output
    assert len(steps(launcher.folder, 1)) == 33
    assert history(launcher.folder, 1)["islands"][-1] == 1


@pytest.mark.full
def test_an_island_that_stands_still_costs_the_others_no_step(launcher):
    options = {"delay": 2, "min_participants": 1, "patience_seconds": 0.3}
    process = launcher.start(
        "-n", "2", "--islands", SCRIPT, arguments(4, 0.1, **options)
    )
    folder = launcher.folder
    stopped = wait_for_steps(folder, 1, 8)
    os.kill(stopped, signal.SIGSTOP)
    try:
        wait_for_steps(folder, 0, 44)
        assert len(steps(folder, 1)) < 30
    finally:
        os.kill(stopped, signal.SIGCONT)
    code, output = ended(process)
    assert code == 0, output
    assert len(steps(folder, 1)) == 44
    assert history(folder, 0)["staleness"] == [2, 2, 2, 2]


@pytest.mark.full
def test_the_hub_stays_until_islands_of_other_machines_are_through(launcher):
    options = {"delay": 2, "min_participants": 1, "patience_seconds": 0.1}
    first, second = start_on_two_machines(
        launcher, arguments(1, **options), arguments(2, 0.4, **options)
    )
    wait_for_steps(launcher.folder, 0, 11)
    code, output = ended(first)
    assert code == 0, output
    assert "waiting for islands of other machines, which need the hub" in output
    code, output = ended(second)
    assert code == 0, output
    assert len(steps(launcher.folder, 1)) == 22


@pytest.mark.full
def test_islands_without_diloco_say_so(launcher):
    launcher.script(
        """
        import keras, numpy as np, tfdp
        with tfdp.auto_strategy().scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        """
    )
    code, output = ended(launcher.start("-n", "2", "--islands", "script.py"))
    assert code == 1
    assert "which synchronizes the islands" in output
