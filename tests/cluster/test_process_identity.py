"""Whether another process of this machine runs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.harness.commands import ROOT
from tfdp.ground.base.process_identity import ProcessIdentity

CODE = """
import dataclasses, json, sys
from tfdp.ground.base.process_identity import ProcessIdentity
print(json.dumps(dataclasses.asdict(ProcessIdentity.current())), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_has_ended_when_it_is_killed_and_before_anybody_reaps_it():
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        assert process.stdout is not None
        found = ProcessIdentity(**json.loads(process.stdout.readline()))
        assert found.pid == process.pid
        assert not found.has_ended()
        # Its id is another process's now, or that of a process of another machine.
        assert dataclasses.replace(found, started="1").has_ended()
        process.kill()
        while not found.has_ended():
            pass
        assert process.returncode is None
        process.wait()
    assert found.has_ended()
    for machine in ("", "another"):
        assert not dataclasses.replace(found, machine=machine).has_ended()


def test_this_process_runs():
    assert not ProcessIdentity.current().has_ended()
