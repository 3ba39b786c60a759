"""Data sources that give no batch: who says so, and who ends."""

from __future__ import annotations

import collections.abc
import json
import pathlib
import re
import subprocess
import sys
import time

import pytest

from tests.cli.launcher import Launcher
from tests.harness.tiers import full
from tfdp.communication.coordination import data_wait as module
from tfdp.communication.coordination.data_wait import BatchWait, ReadCounts
from tfdp.communication.coordination.progress import ProgressRecorder
from tfdp.communication.coordination.watch.data_watch import DataWatch

SCRIPT = str(pathlib.Path(__file__).with_name("hanging_data.py"))
TIMEOUT_SECONDS = 6.0
# The first 10 s of a wait in a collective cause no message.
IN_CUSTOM_LOOP = {"in_custom_loop": True, "timeout_seconds": 12.0}
ONE_PROCESS, TWO_WORKERS = ("-n", "1", "-D", "2"), ("-n", "2")


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def run(launcher: Launcher, where: tuple, kind: str, at: int, **more) -> tuple:
    arguments = {"ranks": [0, 1], "timeout_seconds": TIMEOUT_SECONDS, **more}
    line = json.dumps({"kind": kind, "at": at, **arguments})
    result = launcher.run(*where, SCRIPT, line)
    launcher.assert_nothing_is_left(within_seconds=5.0)
    return result.returncode, result.stdout


@pytest.mark.slow(seconds=20)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "kind", "at", "more", "words"),
    [
        (
            TWO_WORKERS,
            "generator",
            4,
            {},
            "The generator `batches` has yielded no batch and used no CPU for 6 s at "
            "step 5 of epoch 1 of fit. Check what it waits for",
        ),
        full(ONE_PROCESS, "py_dataset", 4, {}, "The `PyDataset` `Batches` has"),
        full(
            ONE_PROCESS,
            "dataset",
            4,
            {"as_on_gpus": True},
            "The `tf.data.Dataset` that calls Python has yielded no batch and used",
        ),
        # Keras takes the first batch of a generator by itself.
        full(TWO_WORKERS, "generator", 0, {}, "generator `batches` has yielded"),
        full(TWO_WORKERS, "dataset", 4, {"evaluates": True}, "at step 5 of evaluate. "),
        full(
            TWO_WORKERS, "dataset", 6, {"steps_per_epoch": 4, "epochs": 2}, "step 3 of"
        ),
    ],
)
def test_a_source_that_hangs_everywhere_is_named_and_ends_the_job(
    launcher, where, kind, at, more, words
):
    code, output = run(launcher, where, kind, at, **more)
    assert code == 69, output
    assert words in output


@pytest.mark.processes
@pytest.mark.parametrize("rank", [1, full(0)])
@pytest.mark.full
def test_a_source_that_hangs_on_one_worker_is_named_by_the_others(launcher, rank):
    code, output = run(launcher, TWO_WORKERS, "generator", 4, ranks=[rank])
    assert code == 69, output
    assert "The generator `batches` has yielded no batch" in output
    assert "its data source, the generator `batches`, has yielded no batch" in output
    assert f"Worker {rank} (" in output
    assert f"Worker {1 - rank} (" not in output
    assert f"tfdp: worker {rank} failed with exit code 69" in output


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("backend", ["direct", "ring"])
def test_a_worker_that_hangs_in_a_custom_loop_is_named_with_its_line(launcher, backend):
    more = {"ranks": [1], "backend": backend, **IN_CUSTOM_LOOP}
    code, output = run(launcher, TWO_WORKERS, "dataset", 4, **more)
    assert code == 1, output
    assert "tfdp: waiting at " in output
    words = (
        r"Worker 1 \(.*\) was lost.*: it has not arrived within 1\d s; "
        r"it is at .*hanging_data.py:\d+: `for x, _ in strategy.*`; a longer"
    )
    assert re.search(words, output), output


@pytest.mark.processes
@pytest.mark.parametrize("where", [ONE_PROCESS, full(TWO_WORKERS)])
@pytest.mark.full
def test_a_source_that_computes_for_longer_than_the_timeout_is_waited_for(
    launcher, where
):
    more = {"busy_seconds": 15.0, "ranks": [int(where[1]) - 1]}
    code, output = run(launcher, where, "generator", 4, **more)
    assert code == 0, output
    assert output.count("is through") == int(where[1])
    assert "has yielded no batch" not in output


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr(module.clock, "now", lambda: self.now)
        monkeypatch.setattr("time.process_time", lambda: self.used)
        monkeypatch.setattr(
            "tfdp.communication.coordination.watch.data_watch.used_processor_seconds",
            lambda: self.used,
        )


def test_a_wait_is_for_one_batch_and_ends_with_it(monkeypatch):
    clock, wait, recorder = Time(monkeypatch), BatchWait(), ProgressRecorder()
    monkeypatch.setattr(module, "progress", recorder)
    counts = ReadCounts(3, 2)
    wait.read_counts = lambda: counts
    with recorder.looping("fit"):
        recorder.step_begins(2)
        assert wait.seconds == 0.0  # the end of the data: nobody waits
        with recorder.computing():
            assert wait.seconds == 0.0
            clock.now += 7.0
            assert wait.seconds == 7.0
            counts = ReadCounts(4, 3)  # the next one
            assert wait.seconds == 0.0
            clock.now += 2.0
            assert wait.seconds == 2.0
            counts = ReadCounts(4, 4)
            assert wait.seconds == 0.0
    with wait.reading():
        assert wait.seconds == 0.0
        clock.now += 5.0
        assert wait.seconds == 5.0
    assert wait.seconds == 0.0


def test_a_source_lives_while_it_uses_a_processor(monkeypatch):
    clock, wait = Time(monkeypatch), BatchWait()
    monkeypatch.setattr(
        "tfdp.communication.coordination.watch.data_watch.data_wait", wait
    )
    watch = DataWatch(10.0)
    with wait.reading():
        for second in range(1, 40):
            clock.now += 1.0
            clock.used += 0.9 if second in (9, 18, 27) else 0.01
            watch.update()
            assert (watch.failure(0) is not None) == (second > 37)
    failure = watch.failure(0)
    assert failure.own.startswith("The dataset has yielded no batch and used")
    assert failure.cause.endswith("no CPU for 12 s")


COMPUTES = """
import time
while time.process_time() < 0.5:
    pass
print(flush=True)
time.sleep(60)
"""


def test_processes_that_a_source_has_started_count():
    own = time.process_time()
    before = module.used_processor_seconds()
    child = subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        used = module.used_processor_seconds() - before
        assert used - (time.process_time() - own) > 0.4
    finally:
        child.kill()
        child.communicate()
