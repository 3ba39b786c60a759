"""Execution of the commands of the pages, each in a folder with what it reads."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.command_accounts import (
    account_of,
    commands_to_account,
    items,
    pages,
)
from tests.docs.page_commands import (
    Command,
    PageFile,
    is_of_programs,
    simple_commands,
)
from tests.harness.commands import ROOT, run_command
from tests.harness.forks import run_script

FIXTURES = Path(__file__).with_name("fixtures")
# Under the load of other tests; the sum of a page's is limited by pytest-timeout.
DEADLINE_SECONDS = 150.0
DEADLINE_OF_MINUTES = 2400.0
# What the commands take from a checkout.
_OF_CHECKOUT = ("examples", "tools")


@dataclasses.dataclass(frozen=True)
class Run:
    """Commands and files that follow each other in one folder.

    Args:
        name: Of the test: the command, or the page whose story it is.
        takes_minutes: Whether a command has said so.
        items: Commands and files, in the order of the page.
    """

    name: str
    takes_minutes: bool
    items: tuple[Command | PageFile, ...]


def stories() -> list[Run]:
    """The pages that give files: each is told in one folder, from top to bottom."""
    return [run for page in pages() if (run := _story(page))]


def singles() -> list[Run]:
    """The commands that stand by themselves.

    Each runs once, however many pages have it.
    """
    told = {item for run in stories() for item in run.items}
    single: dict[tuple[str, ...], Run] = {}
    for command in commands_to_account():
        account = account_of(command)
        if command in told or account.how != "runs":
            continue
        key = (*command.before, command.text)
        run = Run(" && ".join(key), bool(account.text), (command,))
        single.setdefault((*key, str(command.exits)), run)
    return list(single.values())


def _story(page: str) -> Run | None:
    found = items(page)
    if not any(isinstance(item, PageFile) for item in found):
        return None
    told = [
        item
        for item in found
        if isinstance(item, PageFile)
        or (item.kind == "block" and account_of(item) == _OF_SECONDS)
    ]
    starts = any(isinstance(i, Command) and is_of_programs(i.text) for i in told)
    return Run(page, False, tuple(told)) if starts else None


_OF_SECONDS = account_of(Command("", 0, "tfdp doctor"))


def mark(run: Run) -> Any:
    """The parameter of a test: a time that is long enough."""
    seconds = len(run.items) * _deadline_of(run) + 60
    marks = [pytest.mark.full, pytest.mark.timeout(seconds)]
    return pytest.param(run, id=run.name, marks=marks)


def _deadline_of(run: Run) -> float:
    return DEADLINE_OF_MINUTES if run.takes_minutes else DEADLINE_SECONDS


def save_models(folder: Path) -> Path:
    """Save a Keras model and a checkpoint of tfdp in a folder."""
    code = (FIXTURES / "save_model.py").read_text("utf-8")
    done = run_script(code, folder, deadline_seconds=DEADLINE_SECONDS)
    assert done.code == 0, done.errors
    return folder


def execute(run: Run, folder: Path, models: Path) -> None:
    """Execute what belongs together; fails the test with the page and the line.

    Args:
        run: What to execute.
        folder: Empty folder to do it in.
        models: Folder with `model.keras` and a tfdp checkpoint `checkpoint`.
    """
    for name in _OF_CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    # A file may stand below the first command that uses it.
    for item in reversed(run.items):
        if isinstance(item, PageFile):
            _write(item, folder)
    for item in run.items:
        if isinstance(item, PageFile):
            _write(item, folder)
        else:
            _provide(item.text, folder, models)
            _execute(item, folder, models, _deadline_of(run))


def _write(file: PageFile, folder: Path) -> None:
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text, "utf-8")


def _execute(
    command: Command, folder: Path, home: Path, deadline_seconds: float
) -> None:
    # `python` and `tfdp` are those of the environment that runs the tests.
    programs = os.path.dirname(sys.executable)
    # A pipe fails where any part of it does.
    done = run_command(
        *("bash", "-o", "pipefail", "-c", "\n".join([*command.before, command.text])),
        deadline_seconds=deadline_seconds,
        folder=folder,
        environment={
            "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(home),  # of nobody: pages write to `~/.bashrc`
        },
    )
    assert done.code == command.exits, (
        f"{command.where}: `{command.text}` ended with code {done.code}, and the page "
        f"says {command.exits}:\n{done.output[-5000:]}"
    )


def _provide(text: str, folder: Path, models: Path) -> None:
    """Put there what a command reads and its page does not give."""
    for words in simple_commands(text):
        for path in _scripts_of(words):
            _provide_file(FIXTURES / "train.py", folder / path)
        after = words[words.index("tfdp") + 1 :] if "tfdp" in words else []
        if after[:1] == ["plan"]:
            for word in after:
                if word.endswith(".keras"):
                    _provide_file(models / "model.keras", folder / word)
        elif after[:1] == ["convert"] and after[1:]:
            _provide_file(models / "checkpoint", folder / after[1])


def _scripts_of(words: list[str]) -> list[str]:
    """The scripts that a command names, and the file of a module after `-m`."""
    scripts = [word for word in words if re.fullmatch(r"[\w/.-]+\.py", word)]
    for flag, module in itertools.pairwise(words):
        package = module.partition(".")[0]
        if flag == "-m" and "." in module and not (ROOT / package).exists():
            scripts.append(module.replace(".", "/") + ".py")
    return scripts


def _provide_file(source: Path, target: Path) -> None:
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
