"""A machine's clock that somebody sets while a job runs: nothing takes note of it."""

from __future__ import annotations

import collections.abc
import pathlib
import re
import shutil
import subprocess
import time

import pytest

from tests.cli.launcher import Launcher
from tests.cli.nodes import ended
from tests.store.clusters import cluster_of, members_of
from tfdp.communication.store import Membership
from tfdp.features.monitor import meter as module
from tfdp.features.monitor.meter import Meter

HERE = pathlib.Path(__file__).parent
AN_HOUR = 3600
DEADLINE_SECONDS = 240.0


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("backend", "seconds"),
    [("ring", AN_HOUR), ("direct", AN_HOUR), ("direct", -AN_HOUR)],
)
def test_training_goes_on_while_the_clock_is_set(launcher, backend, seconds):
    library, shift = launcher.folder / "clock.so", launcher.folder / "shift"
    source = str(HERE / "shifted_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), source], check=True)
    shift.write_bytes(bytes(8))
    launcher.environment.update(LD_PRELOAD=str(library), SHIFT_FILE=str(shift))
    script = str(HERE / "clock_worker.py")
    process = launcher.start("-n", "2", script, str(shift), backend, str(seconds))
    code, output = ended(process, DEADLINE_SECONDS)
    assert code == 0, output
    assert output.count(f"shifted by {seconds}") == 2
    assert "heartbeat timeout" not in output
    shares = re.findall(r"(\d+)% of the step", output)
    assert all(int(share) <= 100 for share in shares), output
    launcher.assert_nothing_is_left(within_seconds=5.0)


@pytest.mark.parametrize("seconds", [AN_HOUR, -AN_HOUR])
def test_no_heartbeat_grows_old_when_the_clock_is_set(monkeypatch, seconds):
    now = time.time
    with members_of(cluster_of(2)) as members:

        def beat(member: Membership, *, wants_all: bool = False) -> dict:
            kind = {"is_notable": False, "is_news": False, "wants_all": wants_all}
            return member.store.beat("report", **kind)

        beat(members[1])
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        assert beat(members[0])["ages"] == {}
        found = beat(members[0], wants_all=True)["beats"]
        assert set(found) == {"0", "1"}
        assert all(0.0 <= age < 60.0 for age, _ in found.values())


@pytest.mark.parametrize(("seconds", "is_read"), [(0, True), (3600, False)])
def test_a_step_in_which_the_clock_was_set_is_not_measured(
    monkeypatch, seconds, is_read
):
    shift = [0.0]
    now = module.time.time
    monkeypatch.setattr(module.time, "time", lambda: now() + shift[0])
    meter = Meter()
    meter.step_begins()
    meter.step_ends()  # traced
    shift[0] = seconds
    assert (meter.step_ends() is not None) == is_read
    assert meter.step_ends() is not None
