"""The command `tfdp`: its subcommands, and errors in one sentence."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

import tfdp
from tfdp.launch.cli.screen import OutputEntry

# Commands in the order of the help. Each is a function of a module of its name, which
# is imported only when the command is used: `tfdp run` starts in a third less time.
_COMMANDS = ("run", "doctor", "plan", "convert", "goodput", "bench")

_EXAMPLES = """\b
Examples:
  tfdp doctor                what tfdp sees on this machine
  tfdp run -n 4 train.py     a script in 4 worker processes
  tfdp run --help            the options of a command
"""

USAGE_ERROR = 2
INTERRUPTED = 130


class _Commands(click.Group):
    """Group of the commands; a script's path in their place is a usage error."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands in the order of the help, not alphabetically."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or return `None` if none has this name."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"tfdp.launch.cli.{cmd_name}")
        return getattr(module, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command; raise a `UsageError` with a hint for a script's path.

        Arguments and result are those of `click.Group.resolve_command`.
        """
        name = args[0]
        is_script = name.endswith(".py") or os.path.isfile(name)
        is_named = self.get_command(ctx, name) is not None or ctx.resilient_parsing
        if is_script and not is_named:
            raise click.UsageError(
                f"A script is run by `tfdp run -n 2 {name}`, here with 2 workers. "
                f"Received: {name}"
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=_Commands,
    epilog=_EXAMPLES,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(
    tfdp.__version__, prog_name="tfdp", message="%(prog)s %(version)s"
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Data-parallel training for Keras 3 on TensorFlow.

    A script whose model is made in the scope of `tfdp.auto_strategy()` trains on all
    devices of this machine by `python train.py`, and in several processes by
    `tfdp run`.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        arguments: Sequence of strings, the command line. Defaults to `sys.argv[1:]`.
    """
    run_command(cli, "tfdp", arguments)


def run_command(
    command: click.Command,
    program: str,
    arguments: Sequence[str] | None = None,
    obj: object = None,
) -> None:
    """Run a command and exit with its code.

    A usage error is printed as one sentence on stderr, without click's lines about
    usage, and the exit code is 2.

    Args:
        command: The `click.Command` to run.
        program: String, name of the program in messages.
        arguments: Sequence of strings, the command line. Defaults to `sys.argv[1:]`.
        obj: The object that the command gets as `click.Context.obj`. Defaults to
            `None`.
    """
    try:
        code = command.main(
            arguments, prog_name=program, standalone_mode=False, obj=obj
        )
    except click.ClickException as error:
        text = f"{program}: error: {_describe(error)}"
        if command is cli and _wants_json(arguments):
            text = OutputEntry(text, level="error").to_line().rstrip()
        click.echo(text, err=True)
        code = USAGE_ERROR
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    sys.exit(code)


def _wants_json(arguments: Sequence[str] | None) -> bool:
    """Return whether a command line, possibly invalid, asks `tfdp run` for JSON."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] != ["run"]:
        return False
    from tfdp.launch.cli.run import run

    context = run.make_context(
        "run", words[1:], resilient_parsing=True, ignore_unknown_options=True
    )
    return context.params.get("log_format") == "json"


def _describe(error: click.ClickException) -> str:
    """Return the message of an error; click's own errors get a hint to the help."""
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None or "Received: " in message:
        return message
    end = "" if message.endswith((".", "?", "?)")) else "."
    return f"{message}{end} See `{context.command_path} --help`."
