"""Types of option values, groups of options, and commands with special parsing."""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tfdp.ground.options import CommunicationOptions

# Largest number, and smallest above 0, that an option accepts: values beyond are typing
# errors.
_MOST, _LEAST = 10**9, 1e-9
# Largest size in bytes that an option accepts: larger values are typing errors.
_MAX_BYTES = 2**40
_MAX_NAME = 255  # longest name of a file in bytes, on all usual file systems
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
T = TypeVar("T")
_COUNT = "Give the number of workers with -n"
# Users of `mpirun`, `torchrun` and `horovodrun` may type options of these commands, so
# each such option, matched by a regular expression, gets a hint.
_OTHER_LAUNCHERS = {
    r"-np\d*|--np|--num-proc|--nproc-per-node|-N|--gpus": _COUNT,
    r"-H.*|--host": "Give the machines with --hosts HOST:N,HOST:N",
    r"--nnodes": "Give the number of machines with --nodes",
    r"--master-.*|--rdzv-.*": "Give the address of node 0 with --rendezvous",
    r"--standalone": "Remove it: `tfdp run` needs no other service",
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMG]?B?)", re.IGNORECASE)


class _Bounded(click.ParamType):
    """Type of an option's number that is 0, or from 1e-9 to 10^9, and within limits.

    Args:
        what: String, the requirement in the error after "it must be".
        **limits: Arguments of `click.IntRange` or `click.FloatRange`.
    """

    def __init__(self, what: str, **limits: Any) -> None:
        super().__init__(**limits)
        self.what = what

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the number of an option; raise a usage error if it is out of range."""
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        problem = f"it must be {self.what}"
        # The condition excludes NaN and infinity. `math.isfinite` would raise
        # `OverflowError` for a very long int.
        if number == number and number != math.inf:
            problem = _problem_of(number)
        if problem:
            self.fail(f"{problem}. Received: {_short(value)}", param, ctx)
        return number


class WholeNumber(_Bounded, click.IntRange):
    """Type of an option whose value is an integer in a range."""


class Number(_Bounded, click.FloatRange):
    """Type of an option whose value is a float in a range."""


def _problem_of(number: float) -> str:
    """Return why an option's number is too large or small, or `""` if it is neither."""
    if number > _MOST:
        return f"it must be at most {_MOST:,}"
    if 0 < number < _LEAST:
        return f"it must be at least {_LEAST:.9f}"
    return ""


def _short(value: Any) -> str:
    """Return a value as text of at most 203 characters, for an error."""
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."


COUNT = WholeNumber("a whole number of at least 1", min=1)
AT_LEAST_TWO = WholeNumber("a whole number of at least 2", min=2)
NUMBER_OF_TIMES = WholeNumber("a whole number, not negative", min=0)
POSITIVE = Number("one number, above 0", min=0, min_open=True)
FRACTION = Number("a number from 0 to 1", min=0, max=1)
SECONDS = Number("a number of seconds, not negative", min=0)
MILLIONS = Number("millions of parameters, above 0", min=0, min_open=True)


class Checked(click.ParamType):
    """Type of an option whose value a function parses and checks.

    Args:
        name: String, name of the type in the help.
        parse: Callable that maps the text to the value, or raises `ValueError` with a
            sentence about what the text must be.
        is_file: Bool, whether the shell completes the value as the name of a file.
            Defaults to `False`.
    """

    def __init__(
        self, name: str, parse: Callable[[str], Any], *, is_file: bool = False
    ) -> None:
        self.name, self._parse, self._is_file = name, parse, is_file

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the parsed value, or raise a usage error with the reason."""
        try:
            return self._parse(value)
        except ValueError as error:
            return self.fail(f"{error}. Received: {_short(value)}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete a file's name if `is_file`; complete nothing else."""
        return [CompletionItem(incomplete, type="file")] if self._is_file else []


def _num_bytes(text: str) -> int:
    """Parse a size such as `64KB`, in units of 1024; return it in bytes.

    Raises:
        ValueError: If the text is not a size, or the size is below 1 byte or too large.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match["unit"].upper() if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    num_bytes = float(match["number"]) * _UNITS[unit] if match else 0.0
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"it must be at most {_MAX_BYTES >> 30}GB")
    if num_bytes < 1:
        raise ValueError(
            "it must be a size of at least 1 byte, such as 65536, 64KB or 1MB"
        )
    return int(num_bytes)


def _levels(text: str, *, above_zero: bool) -> tuple[float, float]:
    """Parse a latency or bandwidth: one number, or two, inside nodes and across.

    Args:
        text: String, the value of the option.
        above_zero: Bool, whether 0 is an error.

    Returns:
        Tuple of the two numbers, which are the same if only one was given.

    Raises:
        ValueError: If there are not one or two numbers, or one is out of range.
    """
    least = "above 0" if above_zero else "not negative"
    what = f"it must be one number, or two (inside nodes, across nodes), {least}"
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(what) from None
    is_in_range = all(n > 0 or (n == 0 and not above_zero) for n in numbers)
    if not is_in_range or math.inf in numbers or len(numbers) > 2:
        raise ValueError(what)
    if problem := next(filter(None, map(_problem_of, numbers)), ""):
        raise ValueError(problem)
    return numbers[0], numbers[-1]


def _algorithm(text: str) -> str | dict[str, str]:
    """Parse an all-reduce algorithm as the option of `CommunicationOptions`.

    Args:
        text: String, such as `"ring"` or `"hierarchical:ring,tree"`.

    Returns:
        Dict with the algorithms `"inner"` and `"outer"` for a hierarchical one, by
        default `"ring"`; otherwise `text`.

    Raises:
        ValueError: If the algorithm is unknown.
    """
    name, _, levels = text.partition(":")
    inner, _, outer = levels.partition(",")
    option: str | dict[str, str] = text
    if name == "hierarchical":
        option = {"inner": inner or "ring", "outer": outer or "ring"}
    try:
        CommunicationOptions(algorithm=option)
    except ValueError as error:
        raise ValueError(
            "it must be auto, ring, tree, halving_doubling, hierarchical, "
            "hierarchical:INNER,OUTER, or adasum"
        ) from error
    return option


def _output_file(text: str) -> Path:
    """Return the path of a file; raise `ValueError` if it cannot be written."""
    path = Path(text)
    # For an invalid name, some methods of `Path` raise an error, so functions of
    # `os.path` are used, which return false.
    if os.path.isdir(path):
        raise ValueError("the file is a folder")
    if not os.path.isdir(path.parent):
        raise ValueError("the folder of the file does not exist")
    exists = os.path.exists(path)
    is_too_long = len(os.fsencode(path.name)) > _MAX_NAME
    if is_too_long or not os.access(path if exists else path.parent, os.W_OK):
        raise ValueError("the file cannot be written")
    return path


SIZE = Checked("size", _num_bytes)
# Links inside a node differ from links across nodes, so the values of these types are
# two numbers, or one for both.
LATENCIES = Checked("levels", functools.partial(_levels, above_zero=False))
BANDWIDTHS = Checked("levels", functools.partial(_levels, above_zero=True))
ALGORITHM = Checked("algorithm", _algorithm)
# A command may run for minutes before it writes its file, so this type checks first
# that the file can be written.
OUTPUT_FILE = Checked("file", _output_file, is_file=True)
# Each command checks its paths itself, with more specific errors, so this type only
# lets the shell complete a path.
FILE = Checked("path", str, is_file=True)


def option(
    declaration: str, text: str, type: click.ParamType | None = None, **settings: Any
) -> Decorator:
    """Return a decorator that adds an option to a command.

    Args:
        declaration: String, the option as in the help: its names and the placeholder of
            its value, such as `"-n --num-workers N"`. Without a placeholder and a type,
            the option is a flag.
        text: String, the help.
        type: Type of the value. Defaults to `None`, a string.
        **settings: Further arguments of `click.option`, and `name`: the name of the
            function's parameter if it differs from the option's. A default is shown in
            the help.
    """
    words = declaration.split()
    names = [word for word in words if word.startswith("-")]
    metavar = next((word for word in words if word not in names), None)
    if metavar is None and type is None:
        settings["is_flag"] = True
    if "name" in settings:
        names.append(settings.pop("name"))
    settings.setdefault("show_default", "default" in settings)
    return click.option(*names, metavar=metavar, type=type, help=text, **settings)


# Many options have one of these types, so each type has a short form of `option`.
count_option = functools.partial(option, type=COUNT)
seconds_option = functools.partial(option, type=SECONDS)
positive_option = functools.partial(option, type=POSITIVE)
file_option = functools.partial(option, type=FILE)
output_option = functools.partial(option, type=OUTPUT_FILE)


def pop_fields(kind: type[T], arguments: dict[str, Any]) -> T:
    """Move the fields of a dataclass from `arguments` to a new instance of it.

    Args:
        kind: The dataclass.
        arguments: Dict of the values of all options by name.
    """
    return kind(**{key: arguments.pop(key) for key in inspect.get_annotations(kind)})


def with_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options to a command.

    Args:
        *options: Decorators that add one option each, in the order of the help.
    """
    return lambda function: functools.reduce(
        lambda decorated, option: option(decorated), reversed(options), function
    )


class ManyValues(click.Command):
    """Command whose options can have several values: `--models 1 5 20`.

    These are the options with `multiple=True`. The values end at the next option, and
    in a command with arguments also at the first word that is not a number.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat options before each of their values, and parse the command line."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        many = {n for o in options if o.multiple for n in o.opts}
        flags = {n for o in options if o.is_flag for n in o.opts}
        has_arguments = len(options) < len(self.params)
        return super().parse_args(ctx, _repeated(args, many, flags, has_arguments))


def _repeated(
    args: list[str], many: set[str], flags: set[str], only_numbers: bool
) -> list[str]:
    """Return a command line with options repeated before each of their values.

    Args:
        args: List of strings, the command line.
        many: Set of the names of options that can have several values.
        flags: Set of the names of options without a value.
        only_numbers: Bool, whether the values end at a word that is not a number.
    """
    result: list[str] = []
    option, needs_value = "", False
    for index, word in enumerate(args):
        if needs_value:
            needs_value = False
        elif word == "--":
            return result + args[index:]
        elif word.startswith("-") and not _is_number(word):
            option = word if word in many else ""
            needs_value = "=" not in word and word not in flags
        elif option and (_is_number(word) or not only_numbers):
            result.append(option)
        elif only_numbers:
            return result + args[index:]  # a script and its own arguments follow
        result.append(word)
    return result


def _is_number(word: str) -> bool:
    """Return whether a word of the command line is a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


class HintingCommand(click.Command):
    """Command that refuses options of other launchers, such as `-np`, with a hint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; raise `UsageError` for another launcher's option."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        with_value = {name for o in options if not o.is_flag for name in o.opts}
        previous = ""
        for word in args:
            name = word.partition("=")[0]
            for names, hint in _OTHER_LAUNCHERS.items():
                is_foreign = re.fullmatch(names, name.replace("_", "-"))
                if is_foreign and not ctx.resilient_parsing:
                    raise click.UsageError(f"{hint}. Received: {name}")
            if not word.startswith("-") and previous not in with_value:
                break  # the word is the script: all later options are the script's own
            previous = word
        return super().parse_args(ctx, args)
