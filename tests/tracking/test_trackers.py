"""A script for one process logs to MLflow and Weights & Biases once, on two workers.

They need both, which `tools/test_tracking` installs in an environment of its own.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import ROOT, run_command

mlflow = pytest.importorskip("mlflow", reason="not installed: tools/test_tracking")
pytest.importorskip("wandb", reason="not installed: tools/test_tracking")

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(300)]

DEADLINE_SECONDS = 200.0
SCRIPT = str(ROOT / "tests" / "tracking" / "tracked.py")
LAUNCHER = ("-m", "tfdp", "run", "-n", "2")
# Of the files of Weights & Biases: a header, then blocks with pieces of records.
_HEADER_BYTES, _BLOCK_BYTES, _PIECE = 7, 1 << 15, struct.Struct("<IHB")
_LAST_PIECES = (1, 4)


def run(folder: Path, *arguments: str, launcher: tuple[str, ...] = LAUNCHER) -> None:
    """Run the script in a folder of its own."""
    folder.mkdir()
    done = run_command(
        sys.executable,
        *launcher,
        SCRIPT,
        *arguments,
        deadline_seconds=DEADLINE_SECONDS,
        folder=folder,
        environment={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.code == 0, done.output


def runs_of_mlflow(folder: Path, name: str = "mlflow.db") -> list[dict[str, Any]]:
    """The runs of a folder's store: status, parameters and losses by epoch."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/{name}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    return [
        {
            "status": each.info.status,
            "params": each.data.params,
            "losses": {
                metric.step: metric.value
                for metric in client.get_metric_history(each.info.run_id, "loss")
            },
        }
        for each in client.search_runs(experiments)
    ]


def runs_of_wandb(folder: Path) -> list[dict[int, float]]:
    """The losses by epoch of each run that was written."""
    found = []
    for path in folder.glob("wandb/offline-run-*/run-*.wandb"):
        rows = [
            {".".join(item.nested_key): float(item.value_json) for item in items}
            for record in records_of(path.read_bytes())
            if (items := record.history.item)
        ]
        found.append({int(row["epoch/epoch"]): row["epoch/loss"] for row in rows})
    return found


def records_of(data: bytes) -> Iterator[Any]:
    """The records of a file of Weights & Biases."""
    from wandb.proto import wandb_internal_pb2

    at, record = _HEADER_BYTES, b""
    while at + _PIECE.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:
            at += left
            continue
        _, size, kind = _PIECE.unpack_from(data, at)
        at += _PIECE.size
        record, at = record + data[at : at + size], at + size
        if kind in _LAST_PIECES:
            parsed = wandb_internal_pb2.Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[int, float]:
    """What one process logs, without any worker."""
    folder = tmp_path_factory.mktemp("one") / "run"
    run(folder, "autolog", "wandb", launcher=())
    (of_wandb,) = runs_of_wandb(folder)
    (of_mlflow,) = runs_of_mlflow(folder)
    assert of_mlflow["losses"] == pytest.approx(of_wandb)
    assert sorted(of_wandb) == [0, 1, 2]
    return of_wandb


@pytest.mark.parametrize(
    "arguments",
    [
        ("wandb,autolog", ""),
        ("", "autolog,wandb", "sharded"),
        ("callback,resume", "wandb"),
    ],
    ids=["before", "after", "resumed"],
)
def test_two_workers_have_one_run_with_the_epochs_of_one_process(
    tmp_path, losses, arguments
):
    before = set(Path(tempfile.gettempdir()).glob("tfdp-mlflow-*"))
    run(tmp_path / "run", *arguments)
    (of_wandb,) = runs_of_wandb(tmp_path / "run")
    (of_mlflow,) = runs_of_mlflow(tmp_path / "run")
    assert of_wandb == pytest.approx(losses, rel=1e-5)
    assert of_mlflow["losses"] == pytest.approx(losses, rel=1e-5)
    assert of_mlflow["status"] == "FINISHED"
    assert ("resumed" in of_mlflow["params"]) == ("callback,resume" in arguments)
    assert set(Path(tempfile.gettempdir()).glob("tfdp-mlflow-*")) == before


def test_who_asks_for_it_has_a_run_of_each_worker(tmp_path, losses):
    run(tmp_path / "run", "each,wandb,by hand", "")
    found = runs_of_wandb(tmp_path / "run")
    assert len(found) == 2
    for own in found:
        assert own == pytest.approx(losses, rel=1e-5)
    for rank in range(2):
        (of_mlflow,) = runs_of_mlflow(tmp_path / "run", f"{rank}.db")
        assert of_mlflow["params"] == {"rank": str(rank)}
