"""Types of values and groups of options; commands that read their line otherwise."""

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

# More, or less, is a slip of the hand, and far from where arithmetic ends.
_MOST, _LEAST = 10**9, 1e-9
_MOST_BYTES = 2**40
_LONGEST_NAME = 255  # bytes, on all usual file systems
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
T = TypeVar("T")
# Options of `mpirun`, `torchrun` and `horovodrun`, and what to give here.
_COUNT = "Give the number of workers with -n"
_ELSEWHERE = {
    r"-np\d*|--np|--num-proc|--nproc-per-node|-N|--gpus": _COUNT,
    r"-H.*|--host": "Give the machines with --hosts HOST:N,HOST:N",
    r"--nnodes": "Give the number of machines with --nodes",
    r"--master-.*|--rdzv-.*": "Give the machines' meeting point with --rendezvous",
    r"--standalone": "Leave it out: `tfdp run` needs no other service",
}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMG]?B?)", re.IGNORECASE)


class _Bounded(click.ParamType):
    """A number; if not 0, of a size with which one can compute.

    Args:
        what: String, the sentence's part after "it must be".
        **limits: Arguments of `click.IntRange` or `click.FloatRange`.
    """

    def __init__(self, what: str, **limits: Any) -> None:
        super().__init__(**limits)
        self.what = what

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        problem = f"it must be {self.what}"
        if number == number and number != math.inf:  # `isfinite` fails of a long int
            problem = _problem_of(number)
        if problem:
            self.fail(f"{problem}. Received: {_short(value)}", param, ctx)
        return number


class WholeNumber(_Bounded, click.IntRange):
    """A whole number in a range."""


class Number(_Bounded, click.FloatRange):
    """A number in a range."""


def _problem_of(number: float) -> str:
    """What is wrong with the size of a number, or `""`."""
    if number > _MOST:
        return f"it must be at most {_MOST:,}"
    if 0 < number < _LEAST:
        return f"it must be at least {_LEAST:.9f}"
    return ""


def _short(value: Any) -> str:
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
    """A type of values that a function reads.

    Args:
        name: String, for the help.
        parse: Callable from the text to the value, which raises `ValueError` with a
            sentence about what the text must be.
        is_file: Bool, whether the shell completes it as the name of a file. Defaults
            to `False`.
    """

    def __init__(
        self, name: str, parse: Callable[[str], Any], *, is_file: bool = False
    ) -> None:
        self.name, self._parse, self._is_file = name, parse, is_file

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            return self.fail(f"{error}. Received: {_short(value)}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")] if self._is_file else []


def _num_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = match["unit"].upper() if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    num_bytes = float(match["number"]) * _UNITS[unit] if match else 0.0
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"it must be at most {_MOST_BYTES >> 30}GB")
    if num_bytes < 1:
        raise ValueError(
            "it must be a size of at least 1 byte, such as 65536, 64KB or 1MB"
        )
    return int(num_bytes)


def _levels(text: str, *, above_zero: bool) -> tuple[float, float]:
    least = "above 0" if above_zero else "not negative"
    what = f"it must be one number, or two (inside nodes, across nodes), {least}"
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(what) from None
    is_right = all(n > 0 or (n == 0 and not above_zero) for n in numbers)
    if not is_right or math.inf in numbers or len(numbers) > 2:
        raise ValueError(what)
    if problem := next(filter(None, map(_problem_of, numbers)), ""):
        raise ValueError(problem)
    return numbers[0], numbers[-1]


def _algorithm(text: str) -> str | dict[str, str]:
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
    path = Path(text)
    # Those of `os.path` are false, too, of what no file can be called.
    if os.path.isdir(path):
        raise ValueError("the file is a folder")
    if not os.path.isdir(path.parent):
        raise ValueError("the file lies in a folder that is not there")
    is_there = os.path.exists(path)
    is_too_long = len(os.fsencode(path.name)) > _LONGEST_NAME
    if is_too_long or not os.access(path if is_there else path.parent, os.W_OK):
        raise ValueError("the file cannot be written")
    return path


# A number of bytes, such as `4KB` or `64 MB` (units of 1024).
SIZE = Checked("size", _num_bytes)
# One number for both levels, or two: inside a node, across nodes.
LATENCIES = Checked("levels", functools.partial(_levels, above_zero=False))
BANDWIDTHS = Checked("levels", functools.partial(_levels, above_zero=True))
# An algorithm of the all-reduce, as the option of `CommunicationOptions`.
ALGORITHM = Checked("algorithm", _algorithm)
# A file that can be written, which is found out now and not after minutes.
OUTPUT_FILE = Checked("file", _output_file, is_file=True)
# A name of a file, which the shell completes, and nothing else looks at.
FILE = Checked("path", str, is_file=True)


def option(
    declaration: str, text: str, type: click.ParamType | None = None, **settings: Any
) -> Decorator:
    """Return what adds an option to a command, declared as its help shows it.

    Args:
        declaration: String, its names and the word for its value, such as
            `"-n --num-workers N"`. Without that word and without a type it is a flag.
        text: String, the help.
        type: Type of the value. Defaults to `None`, a string.
        **settings: Further arguments of `click.option`, and `name`, that of the
            function's argument where it is not the option's. A default is shown.
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


# Options whose values are of the usual types.
count_option = functools.partial(option, type=COUNT)
seconds_option = functools.partial(option, type=SECONDS)
positive_option = functools.partial(option, type=POSITIVE)
file_option = functools.partial(option, type=FILE)
output_option = functools.partial(option, type=OUTPUT_FILE)


def taken(kind: type[T], given: dict[str, Any]) -> T:
    """Take the options that are the fields of a dataclass out of those of a command.

    Args:
        kind: The dataclass.
        given: Dict of the values of options by their names.
    """
    return kind(**{key: given.pop(key) for key in inspect.get_annotations(kind)})


def with_options(*options: Decorator) -> Decorator:
    """Return what adds several options to a command.

    Args:
        *options: Decorators that add one option each, in the order of the help.
    """
    return lambda function: functools.reduce(
        lambda decorated, option: option(decorated), reversed(options), function
    )


class ManyValues(click.Command):
    """A command of which an option can have many values: `--models 1 5 20`.

    The options are those with `multiple=True`. A value ends at the next option,
    and in a command with arguments also at what is no number.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write the option before each of its values, as click wants it."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        many = {n for o in options if o.multiple for n in o.opts}
        flags = {n for o in options if o.is_flag for n in o.opts}
        has_arguments = len(options) < len(self.params)
        return super().parse_args(ctx, _repeated(args, many, flags, has_arguments))


def _repeated(
    args: list[str], many: set[str], flags: set[str], only_numbers: bool
) -> list[str]:
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
            return result + args[index:]  # the rest belongs to another program
        result.append(word)
    return result


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


class HintingCommand(click.Command):
    """A command that knows the options of other launchers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say what to give instead of an option of another launcher."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        with_value = {name for o in options if not o.is_flag for name in o.opts}
        before = ""
        for word in args:
            name = word.partition("=")[0]
            for names, hint in _ELSEWHERE.items():
                is_theirs = re.fullmatch(names, name.replace("_", "-"))
                if is_theirs and not ctx.resilient_parsing:
                    raise click.UsageError(f"{hint}. Received: {name}")
            if not word.startswith("-") and before not in with_value:
                break  # the script, and its own options
            before = word
        return super().parse_args(ctx, args)
