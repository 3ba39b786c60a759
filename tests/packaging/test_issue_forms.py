"""The issue forms are as GitHub takes them: it shows none that is malformed."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.harness.commands import ROOT

FOLDER = ROOT / ".github" / "ISSUE_TEMPLATE"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the sdist has no forms")


def form(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text("utf-8"))


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_a_form_has_its_keys_and_fields_of_different_names(name):
    found = form(name)
    assert set(found) == {"name", "description", "labels", "body"}
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert fields
    ids = [field["id"] for field in fields]
    labels = [field["attributes"]["label"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[\w-]+", each) for each in ids)
    assert {field["type"] for field in fields} == {"textarea"}


def test_files_that_the_forms_name_exist():
    text = "".join(path.read_text("utf-8") for path in FOLDER.iterdir())
    paths = re.findall(r"[\w/]+\.md\b", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
