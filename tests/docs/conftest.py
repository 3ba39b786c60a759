"""What the commands of the pages read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.command_runs import save_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with a Keras model and a checkpoint of tfdp."""
    return save_models(tmp_path_factory.mktemp("models"))
