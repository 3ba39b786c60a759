"""The Dockerfiles hold together, as far as that shows without Docker."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.commands import ROOT
from tests.harness.tiers import full
from tests.packaging.test_distributions import DEADLINE_SECONDS
from tools.docs_check import tracked_files

NAMES = ("Dockerfile.cpu", "Dockerfile.gpu")
FOLDER = ROOT / "examples" / "cluster"


def steps_of(name: str) -> list[tuple[str, str]]:
    """The instructions of a file and their arguments, in order."""
    text = (FOLDER / name).read_text("utf-8")
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def copied(name: str) -> list[tuple[list[str], str]]:
    """What a file copies from the context, and whereto."""
    found = [shlex.split(text) for step, text in steps_of(name) if step == "COPY"]
    return [(words[:-1], words[-1]) for words in found if "--from=build" not in words]


def test_the_page_shows_the_file():
    page = (ROOT / "docs/howto/docker.md").read_text("utf-8")
    shown = re.search(r"^```dockerfile\n(.*?)^```", page, re.M | re.S)
    assert shown
    assert shown[1] == (FOLDER / "Dockerfile.cpu").read_text("utf-8")


def test_the_two_differ_in_what_a_gpu_needs():
    cpu, gpu = (steps_of(name) for name in NAMES)
    differing = [pair for pair in zip(cpu, gpu, strict=True) if pair[0] != pair[1]]
    (((_, without), (_, of_gpu)),) = differing
    assert without == "pip install --no-cache-dir /wheels/*.whl"
    assert of_gpu == 'pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda]"'


@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_python_as_a_user_who_is_not_root(name):
    steps = dict(steps_of(name))  # of each kind the last
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", steps["USER"])
    program, script = json.loads(steps["ENTRYPOINT"])
    assert program == "python"
    assert (["train.py"], script) in copied(name)
    # Nothing is written by root after what the user owns.
    kinds = [step for step, _ in steps_of(name)]
    assert "RUN" not in kinds[kinds.index("USER") :]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a checkout is copied")
@pytest.mark.parametrize("name", [NAMES[0], full(NAMES[1])])
def test_what_is_copied_makes_the_wheel_of_the_package(name, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for sources, target in copied(name)[:2]:
        for source in sources:
            path = source.removeprefix("tfdp/")
            for file in tracked_files(path):
                below = Path(file).relative_to(path) if Path(path) != Path(file) else ""
                place = tmp_path / target.strip("/") / (below or Path(file).name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, place)
    (line,) = [text for step, text in steps_of(name) if "pip wheel" in text]
    words = [
        str(tmp_path / word.strip("/")) if word[0] == "/" else word
        for word in shlex.split(line)[1:]
    ]
    # The machine of the tests may have no package index: setuptools is here.
    subprocess.run(
        [sys.executable, "-m", "pip", *words, "--no-build-isolation"],
        check=True,
        timeout=DEADLINE_SECONDS,
        capture_output=True,
    )
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert found == set(tracked_files("tfdp"))
