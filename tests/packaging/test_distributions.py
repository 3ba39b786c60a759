"""The wheel and the sdist hold what they should, and say of themselves what is so."""

from __future__ import annotations

import ast
import configparser
import email
import email.message
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import tfdp
from tests.harness.commands import ROOT
from tools.docs_check import tracked_files

DEADLINE_SECONDS = 100
# TensorFlow is not there: an isolated build has only setuptools.
BUILD = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "keras", "numpy")))
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
# Whoever has the sdist does not work on tfdp.
OF_A_CHECKOUT = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
RELATIVE_LINK = re.compile(r"\]\((?!#|\w+:)[^)]+\)|\b(?:href|src|srcset)=\"(?!\w+:)")


@dataclass(frozen=True)
class Built:
    """What `python -m build` makes: the names in both, and the wheel's metadata."""

    sdist: set[str]
    wheel: set[str]
    metadata: email.message.Message


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Built:
    if not (ROOT / ".git").exists():
        pytest.skip("only a checkout knows which files are tfdp's")
    pytest.importorskip("setuptools", minversion="77")
    place = tmp_path_factory.mktemp("build")
    for path in tracked_files():
        (place / "checkout" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, place / "checkout" / path)
    build("build_sdist", place / "checkout", place)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        # Python has filters since 3.10.12 and 3.11.4.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        sdist.extractall(place, **safe)
        names = {m.name.partition("/")[2] for m in sdist.getmembers() if m.isfile()}
    build("build_wheel", place / f"tfdp-{tfdp.__version__}", place)
    (file,) = place.glob("*.whl")
    with zipfile.ZipFile(file) as wheel:
        text = wheel.read(f"tfdp-{tfdp.__version__}.dist-info/METADATA").decode()
        return Built(names, set(wheel.namelist()), email.message_from_string(text))


def build(what: str, source: Path, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, place],
        cwd=source,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture
def setup_arguments(monkeypatch) -> dict:
    """What setup.py adds to setup.cfg, and its own names."""
    setuptools = pytest.importorskip("setuptools")
    given: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    return {**runpy.run_path(str(ROOT / "setup.py")), **given}


def test_the_sdist_holds_what_the_tests_and_the_docs_need(built):
    tracked = {p for p in tracked_files() if not p.startswith(OF_A_CHECKOUT)}
    assert tracked <= built.sdist
    made = built.sdist - tracked
    assert made == {"PKG-INFO"} | {n for n in made if n.startswith("tfdp.egg-info/")}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    package = {name for name in built.wheel if ".dist-info/" not in name}
    assert package == set(tracked_files("tfdp"))
    assert "tfdp/py.typed" in package
    info = f"tfdp-{tfdp.__version__}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"} <= built.wheel


def test_the_wheel_says_what_it_is(built, setup_arguments):
    said = built.metadata
    assert (said["Name"], said["Version"]) == ("tfdp", tfdp.__version__)
    assert said["License-Expression"] == "Apache-2.0"
    urls = dict(line.split(", ") for line in said.get_all("Project-URL", []))
    assert urls == setup_arguments["project_urls"]
    assert said["Description-Content-Type"] == "text/markdown"
    assert said.get_payload().strip() == setup_arguments["long_description"].strip()


def test_classifiers_name_the_versions_of_python_that_are_supported(built):
    classifiers = built.metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    minor = r"Programming Language :: Python :: 3\.(\d+)"
    found = [re.fullmatch(minor, line) for line in classifiers]
    versions = [int(match[1]) for match in found if match]
    assert versions == list(range(versions[0], versions[-1] + 1))
    limits = f"<3.{versions[-1] + 1},>=3.{versions[0]}"
    assert built.metadata["Requires-Python"] == limits


def test_every_link_of_the_description_is_absolute_and_leads_somewhere(setup_arguments):
    text = setup_arguments["long_description"]
    assert not RELATIVE_LINK.search(text)
    start = rf"{re.escape(setup_arguments['REPOSITORY'])}/(?:blob|raw)/"
    links = re.findall(rf"{start}([^/]+)/([^)#\"]+)", text)
    assert {tag for tag, _ in links} == {f"v{tfdp.__version__}"}
    assert all((ROOT / path).exists() for _, path in links)
    assert len(links) == len(RELATIVE_LINK.findall((ROOT / "README.md").read_text()))


@pytest.mark.parametrize(
    ("text", "published"),
    [
        ("[a](docs/a.md#b)", "[a]({0}/blob/v1.2/docs/a.md#b)"),
        ("![a](docs/a.svg)", "![a]({0}/raw/v1.2/docs/a.svg)"),
        ('<img src="a.png" width="4">', '<img src="{0}/raw/v1.2/a.png" width="4">'),
        (
            "[![a](a.png)](b.md)",
            "[![a]({0}/raw/v1.2/a.png)]({0}/blob/v1.2/b.md)",
        ),
        ("[a](#b) [c](https://d.e/f) [g](mailto:h@i)", None),
        ("```python\ncallbacks[0](logs)\n```", None),
    ],
)
def test_links_of_the_description_lead_to_the_tag(setup_arguments, text, published):
    found = setup_arguments["with_absolute_links"](text, "1.2")
    assert found == (published or text).format(setup_arguments["REPOSITORY"])


def test_each_package_that_tfdp_imports_is_asked_for():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    asked = config["options"]["install_requires"].split("\n")
    for extra in ("bench", "ray", "tensorboard"):
        asked += config["options.extras_require"][extra].split("\n")
    names = {re.split(r"[<>=\[]", line)[0] for line in asked}
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "tfdp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in imported_by(node)
    }
    # PyTorch is a side of a benchmark, in a Python that has it.
    others = imported - set(sys.stdlib_module_names) - {"tfdp", "torch"}
    assert others <= names


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []
