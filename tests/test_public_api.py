"""The public names and what they take are those of tests/public_api.txt."""

from __future__ import annotations

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
