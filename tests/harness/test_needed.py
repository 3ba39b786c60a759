"""What `tools/needed` names is there, and follows from the files of a change."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import pathlib

import pytest

from tests.harness.registry import load_cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LOADER = importlib.machinery.SourceFileLoader("needed", str(ROOT / "tools/needed"))
_SPEC = importlib.util.spec_from_loader("needed", _LOADER)
assert _SPEC is not None
needed = importlib.util.module_from_spec(_SPEC)
_LOADER.exec_module(needed)

TABLES = (needed.NEEDED, needed.LEFT_OUT)
CLI = "tests/cli/test_nodes.py::test_all_nodes_start_again_together"


def test_each_named_test_is_a_function_of_its_file():
    cases = load_cases()
    for test in {t for table in TABLES for tests in table.values() for t in tests}:
        path, _, name = test.partition("::")
        name, _, parameters = name.removesuffix("]").partition("[")
        text = (ROOT / path).read_text("utf-8")
        tree = ast.parse(text)
        functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert not name or name in functions, test
        if parameters and f"def {name}(clusters" in text:
            case, _, setup = parameters.rpartition("-")
            assert setup in cases[case].setups, test
            assert setup != cases[case].quick_setup, test


def test_each_package_of_tfdp_needs_something():
    beginnings = tuple(begin for table in TABLES for key in table for begin in key)
    packages = {path.parent for path in (ROOT / "tfdp").glob("*/__init__.py")}
    names = {f"tfdp/{package.name}/" for package in packages}
    assert {name for name in names if not name.startswith(beginnings)} == set()
    assert all((ROOT / begin).exists() for begin in beginnings)


@pytest.mark.parametrize(
    ("paths", "is_named"),
    [
        (["tfdp/launch/cli.py", "CHANGELOG.md"], True),
        (["CHANGELOG.md"], False),
        ([], False),
        (None, True),
    ],
)
def test_tests_are_those_of_the_changed_files(monkeypatch, capsys, paths, is_named):
    monkeypatch.setattr(needed, "changed", lambda commit: paths)
    needed.main([])
    lines = capsys.readouterr().out.splitlines()
    assert (CLI in lines) == is_named
    assert len(lines) == len(set(lines))
    assert all(lines)


def test_without_git_and_in_the_branch_of_the_origin_all_is_needed(monkeypatch):
    monkeypatch.setattr(needed, "git", lambda *arguments: None)
    assert needed.changed(None) is None
    monkeypatch.setattr(needed, "git", lambda *arguments: "the same commit")
    assert needed.changed(None) is None


def test_a_change_is_what_the_checkout_has_beyond_its_base(monkeypatch):
    answers = {"merge-base": "base", "rev-parse": "head", "diff": "a.py\nb c.py"}
    monkeypatch.setattr(needed, "git", lambda *arguments: answers[arguments[0]])
    assert needed.changed(None) == ["a.py", "b c.py"]
