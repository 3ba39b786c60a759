"""The public names of tfdp with their signatures, one a line.

`python -m tests.harness.public_api > tests/public_api.txt` takes them as they are.
Annotations are left out: they may name what is not public.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import typing

import click

from tools.docs_names import ROOT, public_names


def lines() -> list[str]:
    """All names and what they take, sorted."""
    found = []
    for name, home in public_names().items():
        module = __import__(home, fromlist=["_"])
        found += _lines_of(name, getattr(module, name.rpartition(".")[2]))
    return sorted([*found, *_commands()])


def values() -> typing.Iterator[tuple[str, typing.Any]]:
    """What has annotations: functions, classes, and methods of these."""
    for name, home in public_names().items():
        value = getattr(__import__(home, fromlist=["_"]), name.rpartition(".")[2])
        yield name, value
        if isinstance(value, type):
            members = {"__init__": value.__init__, **_members(value)}
            for member, kind in members.items():
                if inspect.isfunction(kind):
                    yield f"{name}.{member}", kind


def _lines_of(name: str, value: typing.Any) -> list[str]:
    if not callable(value):
        return [name]
    found = [name + _signature(value)]
    if isinstance(value, type):
        for member, kind in _members(value).items():
            taken = _signature(kind) if inspect.isfunction(kind) else ""
            found.append(f"{name}.{member}{taken}")
    return found


@functools.cache
def _documented() -> set[str]:
    """Names that the docs show as members of something, or by themselves."""
    folders = (ROOT / "docs", ROOT / "docs" / "reports")
    pages = [ROOT / "README.md"]
    pages += [page for folder in folders for page in folder.glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    return set(re.findall(r"(?<=[.`])(?<!\[`)([a-z]\w+)(?=[`(., )=])", text))


def _members(kind: type) -> dict[str, typing.Any]:
    """What tfdp's own classes add, of which the docs tell; hooks of Keras aside."""
    found: dict[str, typing.Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] != "tfdp":
            continue
        for name, value in vars(base).items():
            if name in _documented() and not name.startswith("on_"):
                found[name] = inspect.unwrap(getattr(value, "__func__", value))
    return found


def _signature(value: typing.Any) -> str:
    signature = inspect.signature(value)
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    text = str(
        signature.replace(
            parameters=parameters, return_annotation=inspect.Signature.empty
        )
    )
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _commands() -> list[str]:
    from tfdp.launch.cli.main import cli

    return list(_command_lines("tfdp", cli))


def _command_lines(name: str, command: click.Command) -> typing.Iterator[str]:
    yield f"$ {name}"
    for option in command.params:
        written = "/".join([*option.opts, *option.secondary_opts])
        if isinstance(option, click.Argument):
            written = f"{option.human_readable_name} nargs={option.nargs}"
        yield f"$ {name} {written}{_value_of(option)}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for part in sorted(command.list_commands(context)):
            inner = command.get_command(context, part)
            yield from _command_lines(f"{name} {part}", inner)


def _value_of(option: click.Parameter) -> str:
    """What an option takes and, where nothing is given, is."""
    if getattr(option, "is_flag", False):
        return ""
    choices = getattr(option.type, "choices", None)
    kind = "|".join(choices) if choices else ""
    default = option.default
    if not isinstance(default, (bool, int, float, str, tuple, list)):
        return f" {kind}".rstrip()
    # The interpreter that runs this stands for itself.
    return f" {kind}".rstrip() + f" = {default!r}".replace(sys.executable, "python")


if __name__ == "__main__":
    print("\n".join(lines()))
