"""The commands of README, CONTRIBUTING, docs/ and the examples run to their end.

Each stands by itself here; a page that gives files is told in `test_stories_run.py`.
What becomes of the other commands says `command_accounts.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.command_runs import Run, execute, mark, singles

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize("run", [mark(run) for run in singles()])
def test_the_commands_of_the_pages_run_to_their_end(
    run: Run, tmp_path: Path, models: Path
):
    execute(run, tmp_path, models)
