"""The page of the commands that tests do not execute: docs/reports/commands.md.

    python -m tests.docs.command_list

writes it anew.
"""

from __future__ import annotations

import html
import posixpath

from tests.docs.command_accounts import (
    LIST,
    Account,
    account_of,
    commands_to_account,
)
from tests.docs.page_commands import Command
from tests.harness.commands import ROOT

# ruff: noqa: E501 a row of a table is one line
_OPENING = """\
# Commands on the pages

The tests execute every command of a block on the pages of `docs/`, in `README.md`, in
`CONTRIBUTING.md` and in the first lines of the examples, except the commands listed below.
They run in the full tier, by `tests/docs/test_commands_run.py` or, with the files of the page,
by `test_stories_run.py`. For the listed commands and for commands in the text, the tests check
the options. `python -m tests.docs.command_list` writes this page.

A comment in front of a block describes its commands:

| comment | meaning |
| --- | --- |
| `<!-- file: train.py -->` | the block is a file that the commands of the page use; a page with files runs from top to bottom in one folder |
| `<!-- needs: a Slurm cluster -->` | the commands are listed here and not executed |
| `<!-- takes: minutes -->` | the commands have a longer deadline |
| `<!-- exits: 1 -->` | the commands exit with this code instead of 0 |

For a script that a page does not give, the tests use a small one that trains for a second.
"""


def page() -> str:
    """The text of the page, of the commands that there are."""
    accounts = [(command, account_of(command)) for command in commands_to_account()]
    needs = [pair for pair in accounts if pair[1].how == "needs"]
    elsewhere = [pair for pair in accounts if pair[1].how == "elsewhere"]
    return "\n".join(
        [
            _OPENING,
            "## Commands that need what is not everywhere\n",
            _table("needs", needs),
            "## Commands that other tests and tools execute\n",
            "The examples run with `--short` if they have it; `tools/lint` runs "
            "without `--fix`, and `tools/test` over all rooms.\n",
            _table("executed by", elsewhere),
        ]
    )


def _table(title: str, pairs: list[tuple[Command, Account]]) -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for command, account in pairs:
        where = rows.setdefault((account.text, as_code(command.text)), [])
        if command.page not in where:
            where.append(command.page)
    lines = [f"| {title} | command | where |", "| --- | --- | --- |"]
    for (text, code), where in sorted(rows.items()):
        cell = as_code(text) if (ROOT / text).is_file() else text
        lines.append(f"| {cell} | {code} | {', '.join(map(_link, where))} |")
    return "\n".join(lines) + "\n"


def as_code(text: str) -> str:
    """Code in a cell of a table: a command, or its first line."""
    first, _, more = text.partition("\n")
    text = " ".join([*first.split(), *(["..."] if more else [])])
    if not set(text) & set("`|"):
        return f"`{text}`"
    # GitHub and MkDocs do not agree on how to write a bar in a cell's code.
    text = html.escape(text, quote=False).replace("|", "&#124;")
    return f"<code>{text.replace('`', '&#96;')}</code>"


def _link(path: str) -> str:
    return f"[{path}]({posixpath.relpath(path, posixpath.dirname(LIST))})"


if __name__ == "__main__":
    (ROOT / LIST).write_text(page(), "utf-8")
