"""Which worker logs, and that nothing is touched where there is no other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.commands import ROOT

DEADLINE_SECONDS = 60
# In the place of the package, which is not everywhere.
WANDB = "run = None\ndef init(project=None, mode=None):\n    return mode\n"
HOSTS = json.dumps({"worker": ["a:1", "b:1"], "evaluator": ["e:1"]})
IMPORTS = {"before": "import wandb, tfdp", "after": "import tfdp, wandb"}


def tf_config(task: str, index: int) -> dict[str, str]:
    config = {
        "cluster": json.loads(HOSTS),
        "task": {"type": task, "index": index},
    }
    return {"TF_CONFIG": json.dumps(config)}


def run(folder: Path, code: str, environ: dict[str, str]) -> str:
    """Run Python beside such a `wandb`, with no other variable of a cluster."""
    (folder / "wandb.py").write_text(WANDB, "utf-8")
    (folder / "script.py").write_text(code, "utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [sys.executable, folder / "script.py"],
        env=kept | {"PYTHONPATH": f"{folder}:{ROOT}"} | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    return done.stdout.strip() + done.stderr


@pytest.mark.parametrize("order", IMPORTS)
@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "online"),
        (tf_config("worker", 0), "online"),
        (tf_config("worker", 1), "disabled"),
        (tf_config("evaluator", 0), "online"),
        ({"TF_CONFIG": "{"}, "online"),
        (
            {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"},
            "disabled",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            "disabled" if importlib.util.find_spec("mpi4py") else "online",
            id="mpi",
        ),
    ],
)
def test_the_first_worker_makes_the_run(tmp_path, environ, mode, order):
    code = f"{IMPORTS[order]}\nprint(wandb.init(mode='online'))"
    assert run(tmp_path, code, environ) == mode


def test_a_run_for_each_worker_can_be_asked_for(tmp_path):
    code = "import wandb, tfdp\ntfdp.track_each_worker()\nprint(wandb.init('a', 'b'))"
    assert run(tmp_path, code, tf_config("worker", 1)) == "b"


@pytest.mark.parametrize("environ", [{}, tf_config("worker", 0)])
def test_in_one_process_and_on_the_first_worker_nothing_is_touched(tmp_path, environ):
    code = "import wandb; f = wandb.init; import tfdp\nprint(f is wandb.init)"
    assert run(tmp_path, code, environ) == "True"


def test_a_run_that_was_made_before_is_warned_of(tmp_path):
    code = "import wandb; wandb.run = 1\nimport tfdp\nprint(wandb.init(mode='online'))"
    found = run(tmp_path, code, tf_config("worker", 1))
    assert found.startswith("disabled")
    assert "script.py:2: UserWarning: `wandb.init` was called before tfdp was" in found
