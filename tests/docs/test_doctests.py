"""The examples in docstrings and in docs/ run and print what they say."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.commands import ROOT
from tests.harness.forks import run_script

pytestmark = pytest.mark.slow

DEADLINE_SECONDS = 240
# Processes that run the pages, each of which stays within the deadline.
NUM_PARTS = 3

# The examples of the modules run in one process, and those of the pages in few others,
# for TensorFlow is slow to import. Two logical CPU devices stand for two replicas; they
# are only asked for here, and come into being when an example first uses TensorFlow.
RUNNER = """
import doctest, importlib, io, json, os, pathlib, re, sys, traceback
import tensorflow as tf
os.chdir(sys.argv[3])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
blocks = re.compile(sys.argv[2], re.M | re.S)

def run_page(name, runner, text):
    # The blocks of a page are one program.
    names, number = {"__name__": "__main__"}, 0
    for number, block in enumerate(blocks.finditer(pathlib.Path(name).read_text()), 1):
        if block["session"]:
            test = doctest.DocTestParser().get_doctest(
                block["session"], names, name, name, 0
            )
            runner.run(test, out=text.write, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile(block["code"], f"{name}, block {number}", "exec"), names)
    return number

reports = {}
for name in sys.argv[4:]:
    text = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=flags)
    try:
        if name.endswith(".md"):
            reports[name] = [run_page(name, runner, text), text.getvalue()]
            continue
        tests = doctest.DocTestFinder().find(importlib.import_module(name))
    except Exception:
        reports[name] = [0, traceback.format_exc()]
        continue
    for test in tests:
        runner.run(test, out=text.write)
    reports[name] = [runner.tries, text.getvalue()]
json.dump(reports, open(sys.argv[1], "w"))
"""

# What of a page is run: sessions, and python blocks below a comment that says so.
BLOCKS = r"^```pycon\n(?P<session>.*?)^```|^<!-- run -->\n```python\n(?P<code>.*?)^```"


def has_example(path: Path) -> bool:
    """Whether a docstring of the file holds an example, found without importing."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = (
        ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)
    )
    return any(">>> " in docstring for docstring in docstrings if docstring)


def modules_with_examples() -> list[str]:
    """The modules of tfdp; those of `tfdp.ray` only where Ray is (`tools/test_ray`)."""
    names = []
    has_ray = importlib.util.find_spec("ray") is not None
    for path in sorted((ROOT / "tfdp").rglob("*.py")):
        if has_example(path) and (has_ray or path.parent.name != "ray"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


def pages_with_examples() -> list[str]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    blocks = re.compile(BLOCKS, re.M | re.S)
    return [
        str(page.relative_to(ROOT))
        for page in pages
        if blocks.search(page.read_text("utf-8"))
    ]


def run_examples(names: list[str], folder: Path) -> dict[str, tuple[int, str]]:
    """For each module or page, how many examples were tried, and what went wrong."""
    file = folder / "reports.json"
    done = run_script(
        RUNNER, *(file, BLOCKS, ROOT), *names, deadline_seconds=DEADLINE_SECONDS
    )
    assert done.code == 0, done.output[-5000:]
    return json.loads(file.read_text("utf-8"))


@pytest.fixture(scope="module")
def reports_of_modules(tmp_path_factory) -> dict[str, tuple[int, str]]:
    return run_examples(modules_with_examples(), tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def reports_of_pages(tmp_path_factory) -> Callable[[int], dict[str, tuple[int, str]]]:
    """The reports of a part of the pages, as `reports_of_pages(part)`."""

    @functools.cache
    def reports_of(part: int) -> dict[str, tuple[int, str]]:
        pages = pages_with_examples()[part::NUM_PARTS]
        return run_examples(pages, tmp_path_factory.mktemp("pages"))

    return reports_of


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_in_docstrings_print_what_they_say(module, reports_of_modules):
    tries, failures = reports_of_modules[module]
    assert not failures, failures
    assert tries > 0, "the examples were not found: is a __doc__ replaced?"


@pytest.mark.full
@pytest.mark.parametrize("page", pages_with_examples())
def test_examples_in_docs_run_and_print_what_they_say(page, reports_of_pages):
    part = pages_with_examples().index(page) % NUM_PARTS
    tries, failures = reports_of_pages(part)[page]
    assert not failures, failures
    assert tries > 0


@pytest.mark.parametrize("name", ["quick_start", "options", "callbacks", "migrating"])
def test_pages_that_show_how_to_begin_have_examples_that_run(name):
    assert f"docs/{name}.md" in pages_with_examples()
