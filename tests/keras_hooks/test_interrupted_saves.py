"""A process that is killed while Keras saves leaves the file that was there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.harness.interrupted import Layout, Result, run
from tests.keras_hooks.interrupted_saves import save

ONE_PROCESS = Layout(1, 2)


def run_save(folder: Path, name: str, how: str, *, kills: bool) -> tuple[Path, Result]:
    path = folder / "files" / name
    path.parent.mkdir()
    arguments = {"path": str(path), "how": how, "kills": kills}
    return path, run(ONE_PROCESS, save, folder, arguments)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("m.keras", "save"),
        ("m.weights.h5", "save_weights"),
        ("m.keras", "save_model"),
        ("m.keras", "checkpoint"),
    ],
)
def test_one_process_that_is_killed_in_a_save_leaves_the_old_file(tmp_path, name, how):
    path, result = run_save(tmp_path, name, how, kills=True)
    assert result.codes == (-signal.SIGKILL,), result.output[-3000:]
    assert path.read_bytes() == (path.parent / "first").read_bytes()


@pytest.mark.processes
def test_a_save_leaves_nothing_beside_the_file_and_keeps_its_permissions(tmp_path):
    path, result = run_save(tmp_path, "m.weights.h5", "save_weights", kills=False)
    assert result.codes == (0,), result.output[-3000:]
    assert result.answers[0]["files"] == ["first", path.name]
    assert path.stat().st_mode & 0o777 == 0o600
