"""The public names and what they take are those of tests/public_api.txt."""

from __future__ import annotations

import ast
import difflib

import pytest

import tfdp
from tests.harness import public_api
from tests.harness.commands import ROOT

FILE = ROOT / "tests" / "public_api.txt"


@pytest.mark.core
def test_public_names_and_their_signatures_are_as_they_were():
    known = FILE.read_text("utf-8").splitlines()
    changes = list(difflib.ndiff(known, public_api.lines()))
    changes = [line for line in changes if not line.startswith((" ", "?"))]
    assert not changes, "meant? `python -m tests.harness.public_api > " + str(FILE)


def test_every_name_of_all_stands_in_the_file():
    names = {line.split("(")[0] for line in FILE.read_text("utf-8").splitlines()}
    packages = {name.rpartition(".")[0] for name in names}
    assert {f"tfdp.{name}" for name in tfdp.__all__} <= names | packages


def test_type_checkers_see_every_name_where_it_comes_from():
    tree = ast.parse((ROOT / "tfdp" / "__init__.py").read_text("utf-8"))
    seen = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    of_packages = {name: "tfdp" for name in seen if tfdp._HOMES[name] == f"tfdp.{name}"}
    assert seen == tfdp._HOMES | of_packages
    assert set(seen) == set(tfdp.__all__)
