"""A release: its files agree, and its workflow does what CONTRIBUTING says."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

import tfdp
from tests.harness.commands import ROOT
from tools import release_check

WORKFLOWS = ROOT / ".github" / "workflows"
FILES = ("CITATION.cff", "CHANGELOG.md", "setup.py", "tfdp/__init__.py")
TAG = f"v{tfdp.__version__}"
SECTION = f"## {tfdp.__version__} - 2027-01-31"


@pytest.fixture
def checkout(tmp_path) -> Path:
    """What a release is made of, as it is before the first one."""
    (tmp_path / "tfdp").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    replace(tmp_path / "CHANGELOG.md", r"^## \d.*$", "## 0.0.1 - 2020-01-01")
    replace(tmp_path / "CITATION.cff", r"^date-released: .*\n", "")
    return tmp_path


def replace(file: Path, pattern: str, text: str) -> None:
    file.write_text(re.sub(pattern, text, file.read_text("utf-8"), flags=re.M), "utf-8")


def released(checkout: Path) -> Path:
    replace(checkout / "CHANGELOG.md", "^## Unreleased$", SECTION)
    replace(
        checkout / "CITATION.cff", "^license:", "date-released: 2027-01-31\nlicense:"
    )
    return checkout


def test_version_changelog_and_citation_agree():
    assert list(release_check.problems()) == []


def test_a_tag_of_this_version_with_its_section_can_be_released(checkout):
    assert list(release_check.problems(released(checkout), TAG)) == []


def test_a_tag_needs_its_version_and_a_section(checkout):
    found = list(release_check.problems(checkout, "v9.9.9"))
    assert found == [
        f"tfdp.__version__ is {tfdp.__version__}, the tag v9.9.9",
        f"CHANGELOG.md has no section `## {tfdp.__version__} - YYYY-MM-DD`",
    ]


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        ("^version: .*", "version: 9.9.9", f"{tfdp.__version__}. Received: 9.9.9"),
        (
            "^date-released: .*",
            "date-released: 2026-01-01",
            "2027-01-31. Received: 2026-01-01",
        ),
        ("^(repository-code: ).*", r"\1https://a.b", "Received: https://a.b"),
    ],
)
def test_a_citation_of_something_else_is_found(checkout, pattern, text, said):
    replace(released(checkout) / "CITATION.cff", pattern, text)
    (problem,) = release_check.problems(checkout, TAG)
    assert problem.startswith("CITATION.cff: ")
    assert problem.endswith(said)


@pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="the sdist has no workflows")
def test_only_what_was_tested_is_published_and_without_a_secret():
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["needs"] == "install"
    assert jobs["install"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    text = (WORKFLOWS / "release.yml").read_text("utf-8")
    assert "secrets." not in text
    assert "password" not in text


@pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="the sdist has no workflows")
@pytest.mark.parametrize("name", ["ci", "release"])
def test_the_workflows_run_what_is_there(name):
    steps = [s for job in workflow(name)["jobs"].values() for s in job["steps"]]
    commands = " ".join(step.get("run", "") for step in steps)
    programs = re.findall(r"(?<!\S)(?:tools/|\.ci/)\S+", commands)
    assert programs
    for program in programs:
        assert program.endswith(".py") or os.access(ROOT / program, os.X_OK)
        assert (ROOT / program).is_file()


@pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="the sdist has no workflows")
def test_ci_tests_the_oldest_and_the_newest_python_and_at_night_all():
    text = (ROOT / "setup.cfg").read_text("utf-8")
    supported = re.findall(r"Python :: (3\.\d+)$", text, re.M)
    jobs = workflow("ci")["jobs"]
    quick, nightly = (
        jobs[name]["strategy"]["matrix"]["python"] for name in ("quick", "versions")
    )
    assert quick == [supported[0], supported[-1]]
    assert nightly == supported


def workflow(name: str) -> dict:
    return yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text("utf-8"))
