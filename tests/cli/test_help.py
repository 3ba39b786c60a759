"""What `--help` shows to somebody new: examples, and nothing cut off."""

from __future__ import annotations

import shlex

import click
import pytest
from click.testing import CliRunner

from tfdp.launch.cli.main import cli

COMMANDS = ["run", "doctor", "plan", "convert", "goodput"]


def help_of(*arguments: str, width: int = 80) -> list[str]:
    result = CliRunner().invoke(cli, [*arguments, "--help"], terminal_width=width)
    assert result.exit_code == 0
    return result.output.splitlines()


@pytest.mark.parametrize("arguments", [(), *((name,) for name in COMMANDS)])
def test_help_has_examples_and_fits_a_terminal(arguments):
    lines = help_of(*arguments)
    assert max(map(len, lines)) <= 80
    (begin,) = [i for i, line in enumerate(lines) if line.strip().startswith("Example")]
    assert lines[begin + 1].strip().startswith("tfdp ")


def test_the_commands_are_listed_in_the_order_of_use_and_described_in_full():
    lines = help_of()
    begin = lines.index("Commands:") + 1
    listed = lines[begin : begin + len(COMMANDS)]
    assert [line.split()[0] for line in listed] == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_are_right(name):
    command = cli.get_command(click.Context(cli), name)
    text = command.epilog.replace("\\\n", " ")
    examples = [line.strip() for line in text.splitlines() if f"tfdp {name}" in line]
    examples = [line for line in examples if line.startswith(("tfdp", "srun"))]
    assert examples
    for example in examples:
        # What it does stands behind it, or follows on the next line.
        words = shlex.split(example.partition("    ")[0] if name != "plan" else example)
        arguments = words[words.index(name) + 1 :]
        context = command.make_context(name, arguments)
        assert isinstance(context, click.Context)
