"""Keras's own tests of `tf.distribute` pass with tfdp's strategy."""

from __future__ import annotations

import re

import pytest

from commands import run_python


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
