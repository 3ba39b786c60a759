"""The public names and what they take are those of tests/public_api.txt."""

from __future__ import annotations

import ast
import difflib
import inspect
import re

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


def test_a_notebook_completes_the_public_names_and_no_others():
    tfdp.CommunicationOptions()  # what is loaded later is no public name either
    assert {name for name in dir(tfdp) if name[0] != "_"} == set(tfdp.__all__)
    assert "__version__" in dir(tfdp)


def test_names_that_have_moved_are_there_and_say_where_they_are(monkeypatch):
    for name in tfdp._MOVED:
        monkeypatch.delitem(vars(tfdp), name, raising=False)
        with pytest.warns(
            UserWarning, match=rf"is now `tfdp.options.{name}`"
        ) as caught:
            found = getattr(tfdp, name)
        assert found is getattr(tfdp.options, name)
        assert caught[0].filename == __file__


def test_types_of_the_public_names_have_no_part_that_is_unknown():
    generic = re.compile(
        r"\b(?:dict|list|tuple|set|Callable|PathLike|Mapping|Sequence)\b(?!\[)"
    )
    bare = [
        f"{name}: {annotation}"
        for name, value in public_api.values()
        for annotation in inspect.get_annotations(value).values()
        if generic.search(str(annotation))
    ]
    assert bare == []
