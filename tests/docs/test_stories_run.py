"""The pages that give files run from top to bottom, with all of their commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.command_runs import Run, execute, mark, stories

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("story", [mark(story) for story in stories()])
def test_the_commands_of_a_page_run_with_its_files(
    story: Run, tmp_path: Path, models: Path
):
    execute(story, tmp_path, models)
