"""Keras's own tests pass with tfdp's strategy."""

from __future__ import annotations

import re

import pytest

from tests.harness.commands import ROOT, run_python
from tools.keras_suite_scope import EXPECTED


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.core
def test_tests_that_ship_with_keras_pass_as_they_do_with_stock():
    done = run_python("tools/keras_suite", "--verbose", deadline_seconds=280)
    assert done.code == 0, done.output
    stock, tfdp = re.findall(r"(\d+) passed, 0 failed, (\d+) skipped", done.output)
    assert stock == tfdp
    assert int(tfdp[0]) >= 16
    # A skip without a reason says nothing.
    skips = re.findall(r"skipped \S+::\S+: \S", done.output)
    assert len(skips) == int(stock[1]) + int(tfdp[1])


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(2600)
def test_tests_that_train_pass_in_a_scope_but_for_those_that_are_explained():
    done = run_python("tools/keras_suite", "--full", deadline_seconds=2500)
    assert done.code == 0, done.output


def test_page_of_differences_names_each_test_of_the_table():
    page = (ROOT / "docs" / "reports" / "keras_suite.md").read_text("utf-8")
    tests = {name.rpartition("::")[2] for name in EXPECTED}
    assert {name for name in tests if f"`{name}`" not in page} == set()
