"""The command `tfdp`: its subcommands, and errors in one sentence."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

import click

from tfdp.cli.bench import bench
from tfdp.cli.convert import convert
from tfdp.cli.doctor import doctor
from tfdp.cli.plan import plan
from tfdp.cli.run import run

USAGE_ERROR = 2
INTERRUPTED = 130


def version() -> str:
    """Return the version of the installed package, or says that there is none."""
    try:
        return importlib.metadata.version("tfdp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


@click.group(
    commands=[run, doctor, plan, convert, bench],
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(version(), prog_name="tfdp", message="%(prog)s %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Data-parallel training for Keras 3 on TensorFlow."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        arguments: Sequence of strings. Defaults to `sys.argv[1:]`.
    """
    run_command(cli, "tfdp", arguments)


def run_command(
    command: click.Command, program: str, arguments: Sequence[str] | None = None
) -> None:
    """Run a command and exit with its code.

    A wrong argument is answered by one sentence on stderr and exit code 2,
    without the lines about usage that click would put around it.

    Args:
        command: The `click.Command`.
        program: String, how it is called.
        arguments: Sequence of strings. Defaults to `sys.argv[1:]`.
    """
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"{program}: error: {error.format_message()}", err=True)
        code = USAGE_ERROR
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)
