"""Waiting for a condition: what it returns, and what it says when the time is over."""

from __future__ import annotations

import pytest

from tests.harness.timing import wait_until


def test_what_a_condition_has_found_is_returned():
    found = iter([None, "", "a file"])
    assert wait_until(lambda: next(found)) == "a file"


def test_a_condition_that_stays_false_is_named():
    with pytest.raises(TimeoutError, match=r"^waited 0\.02 s for the file$"):
        wait_until(lambda: False, "the file", 0.02)
    with pytest.raises(TimeoutError, match=r"for what is left: 3$"):
        wait_until(lambda: False, lambda: f"what is left: {1 + 2}", 0.0)


def test_without_time_a_condition_is_tested_once():
    assert wait_until(lambda: True, seconds=0.0)
