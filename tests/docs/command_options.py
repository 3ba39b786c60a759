"""Options of the commands on pages, compared with what the programs take.

Nothing is run: `tfdp` and `python -m tools.bench` are asked by click, scripts by the
parser that their source makes.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import contextlib
import functools
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from tests.docs.page_commands import NEEDS, Command, simple_commands
from tests.harness.commands import ROOT
from tfdp.launch.cli.main import cli
from tools.bench.__main__ import bench

# Programs of every machine, whose options are theirs.
EVERYWHERE = """
. [ alias awk basename bash cat cd chmod chown column cp cut date df diff dirname du
echo env exec exit export expr false find free getent grep gunzip gzip head hostname
id jq kill less ln ls mkdir mktemp mv nc nohup nproc openssl paste printf ps pwd read
rm sed seq set sh sha256sum sleep sort source stat tail tar tee test time timeout top
touch tr trap true ulimit umask uname uniq unset unzip wait watch wc which xargs zip
"""
# What stands in for the command's own words in prose and in lines of usage.
_PLACEHOLDER = re.compile(r"(?<![\w.])[A-Z][A-Z_]*(?![\w.])|\.\.\.")
# Words that name a file of the repository.
_OF_REPOSITORY = re.compile(r"(?:examples|tests|tools|docs)/[\w./-]*\w$")


class WrongCommand(ValueError):
    """What a program would say of a command."""


def problem_of(command: Command) -> str:
    """What is wrong with a command, in a sentence that names its place, or `""`."""
    is_whole = command.kind == "block"
    try:
        for words in simple_commands(command.text):
            check_words(words, is_whole=is_whole)
    except ValueError as error:
        return f"{command.where}: `{command.text}`: {error}"
    return ""


def check_words(words: Sequence[str], *, is_whole: bool = True) -> None:
    """Compare the words of a simple command with what its program takes.

    Args:
        words: Sequence of strings, without redirections.
        is_whole: Whether nothing may be missing, as in prose and in lines of usage.

    Raises:
        WrongCommand: If the program or an option does not exist.
    """
    name = _name_of(words[0])
    for word in words:
        if _OF_REPOSITORY.match(word) and not (ROOT / word).exists():
            raise WrongCommand(f"there is no {word}")
    if name in _CHECKS:
        _CHECKS[name](list(words[1:]), is_whole)
    elif name.startswith((".ci/", "tools/", "examples/")):
        _check_script(name, list(words[1:]), is_whole)
    elif name in NEEDS or name in EVERYWHERE.split():
        _check_inner(words[1:], is_whole)
    else:
        raise WrongCommand(
            f"{words[0]} is not a program that tests/docs knows; name it in "
            "EVERYWHERE of command_options.py or in NEEDS of page_commands.py"
        )


def _name_of(program: str) -> str:
    name = program.removeprefix("./").removeprefix(".venv/bin/")
    return re.sub(r"^(python|pip)[\d.]+$", r"\1", name)


def _check_inner(words: Sequence[str], is_whole: bool) -> None:
    """What srun, time and the like start is one of our programs, or not ours."""
    for at, word in enumerate(words):
        if _name_of(word) in _CHECKS:
            # `docker run --entrypoint tfdp IMAGE run ...`
            skips = 2 if at and words[at - 1] == "--entrypoint" else 1
            check_words([word, *words[at + skips :]], is_whole=is_whole)
            return


def _check_tfdp(words: list[str], is_whole: bool) -> None:
    _check_click(cli, "tfdp", words, is_whole)


def _check_click(
    command: click.Command, name: str, words: list[str], is_whole: bool
) -> None:
    if isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if not found and not (_PLACEHOLDER.fullmatch(words[0]) and not is_whole):
            raise WrongCommand(f"{name} has no command {words[0]}")
        if found:
            _check_click(found, f"{name} {words[0]}", words[1:], is_whole)
        return
    words = [word for word in words if word != "..."]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            context = command.make_context(name, words)
    except click.exceptions.Exit:  # --help
        return
    except click.ClickException as error:
        may_lack = isinstance(error, click.MissingParameter | click.BadOptionUsage)
        if is_whole or not (may_lack or _PLACEHOLDER.search(error.message)):
            raise WrongCommand(f"{name}: {error.format_message()}") from error
        return
    script = context.params.get("script") or ""
    if (ROOT / script).is_file() and _OF_REPOSITORY.match(script):
        _check_script(script, list(context.params.get("args") or ()), is_whole)
    elif context.params.get("is_module"):
        _check_python(["-m", script, *context.params["args"]], is_whole)


def _check_python(words: list[str], is_whole: bool) -> None:
    while words and words[0] in ("-u", "-q", "-i", "-B"):
        words = words[1:]
    if words[:1] == ["-m"] and words[1:]:
        if words[1] == "tools.bench":
            _check_click(bench, "python -m tools.bench", words[2:], is_whole)
        elif words[1] in _CHECKS:
            _CHECKS[words[1]](words[2:], is_whole)
        elif words[1].startswith(("tests.", "tools.")):
            path = words[1].replace(".", "/") + ".py"
            if not (ROOT / path).is_file():
                raise WrongCommand(f"there is no module {words[1]}")
    elif words and _OF_REPOSITORY.match(words[0]):
        _check_script(words[0], words[1:], is_whole)


@functools.cache
def _extras() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return set(config["options.extras_require"])


def _check_pip(words: list[str], is_whole: bool) -> None:
    for word in words:
        match = re.match(r"(?:tfdp|\.)\[([\w,-]+)\]", word)
        for extra in match[1].split(",") if match else ():
            if extra not in _extras():
                raise WrongCommand(f"setup.cfg has no extra of the name {extra}")


def _check_script(path: str, words: list[str], is_whole: bool) -> None:
    file = ROOT / path
    if not file.is_file():
        raise WrongCommand(f"there is no {path}")
    text = file.read_text("utf-8")
    if text.startswith("#!/usr/bin/env bash"):
        _check_bash_script(path, text, words)
    elif "argparse.ArgumentParser(" in text:
        _check_argparse(path, text, words, is_whole)
    elif words and "sys.argv" not in text:
        raise WrongCommand(f"{path} takes no arguments")


def _check_bash_script(path: str, text: str, words: list[str]) -> None:
    """An option stands in the script's source, or in what it hands its words to."""
    rest = [word for word in words if word not in re.findall(r"--[\w-]+", text)]
    # The others are the script's own.
    if not any(word.startswith("-") for word in rest) and '"${1:?' in text:
        return
    if not rest:
        return
    if "-m pytest" in text:
        _check_pytest(path, rest)
    elif match := re.search(r"(examples/\w+\.py) \"\$@\"", text):
        _check_script(match[1], rest, is_whole=True)
    else:
        raise WrongCommand(f"{path} does not take {rest[0]}")


@functools.cache
def _pytest_parser() -> Any:
    # There is no public way to the options of pytest, its plugins and our conftest.
    return pytest.Config.fromdictargs({}, [])._parser


def _check_pytest(path: str, words: list[str]) -> None:
    _, unknown = _pytest_parser().parse_known_and_unknown_args(words)
    if unknown:
        raise WrongCommand(f"{path}: pytest does not take {unknown[0]}")


class _Anything:
    """A name of a script that its parser mentions and that is not looked up."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *values: Any, **named: Any) -> Any:
        return values[0] if values else self

    def __iter__(self) -> Any:
        return iter(())

    def __truediv__(self, other: Any) -> _Anything:
        return self


class _Names(dict):
    def __missing__(self, name: str) -> Any:
        builtins = (
            __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
        )
        return builtins[name] if name in builtins else _Anything()


def _raise(message: str) -> NoReturn:
    raise WrongCommand(message)


def parser_of(path: str, text: str) -> argparse.ArgumentParser:
    """Make the parser of a script by that part of its source; imports nothing of it."""
    made_by = "argparse.ArgumentParser("
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and made_by in ast.unparse(node):
            break
    else:
        raise WrongCommand(f"{path}: no function makes a parser")
    names = _Names(argparse=argparse, Path=Path, __doc__="...")
    for statement in node.body:
        if ".parse_args(" in ast.unparse(statement):
            break
        exec(compile(ast.Module([statement], []), path, "exec"), {}, names)
    (parser,) = (v for v in names.values() if isinstance(v, argparse.ArgumentParser))
    for action in parser._actions:
        # Choices that stand elsewhere in the script are not known here.
        if not isinstance(action.choices, list | tuple) or not action.choices:
            action.choices = None
    parser.error = _raise  # type: ignore[method-assign]
    return parser


def _check_argparse(path: str, text: str, words: list[str], is_whole: bool) -> None:
    words = [word for word in words if word != "..."]
    if words[:1] in (["--help"], ["-h"]):
        return
    try:
        parser_of(path, text).parse_args(words)
    except WrongCommand as error:
        message = str(error)
        if is_whole or not ("required" in message or _PLACEHOLDER.search(message)):
            raise WrongCommand(f"{path}: {message}") from error


def _check_nothing(words: list[str], is_whole: bool) -> None:
    """Accept what a program of others is given."""


_CHECKS: dict[str, Callable[[list[str], bool], None]] = {
    "tfdp": _check_tfdp,
    "python": _check_python,
    "pip": _check_pip,
    "pytest": lambda words, is_whole: _check_pytest("pytest", words),
    "pre-commit": _check_nothing,
}
