"""The launcher that a test starts."""

from __future__ import annotations

import collections.abc

import pytest

from tests.cli.launcher import Launcher


@pytest.fixture
def launcher(tmp_path) -> collections.abc.Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
