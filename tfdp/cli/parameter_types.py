"""Types of values on the command line, and commands whose options take many."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tfdp.plans.traffic import Algorithm

# More, or less, is a slip of the hand, and far from where arithmetic ends.
_MOST, _LEAST = 10**9, 1e-9
_MOST_BYTES = 2**40
_LONGEST_NAME = 255  # bytes, on all usual file systems
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMG]?B?)", re.IGNORECASE)


def complete_files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the name of a file.

    Args:
        context: Not used.
        parameter: Not used.
        incomplete: String, what was typed.

    Returns:
        List of one `CompletionItem`.
    """
    return [CompletionItem(incomplete, type="file")]


class WholeNumber(click.IntRange):
    """A whole number of at least `min`, and at most a billion."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            least = f" of at least {self.min}" if self.min else ", not negative"
            self.fail(
                f"it must be a whole number{least}. Received: {_short(value)}",
                param,
                ctx,
            )
        if problem := _problem_of(number):
            self.fail(f"{problem}. Received: {_short(value)}", param, ctx)
        return number


class Number(click.FloatRange):
    """A number in a range; if not 0, of a size with which one can compute.

    Args:
        what: String, the sentence's part after "it must be".
        **limits: Arguments of `click.FloatRange`.
    """

    def __init__(self, what: str, **limits: Any) -> None:
        super().__init__(**limits)
        self._what = what

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            number = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        problem = f"it must be {self._what}"
        if math.isfinite(number):
            problem = _problem_of(number)
        if problem:
            self.fail(f"{problem}. Received: {_short(value)}", param, ctx)
        return number


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


COUNT = WholeNumber(min=1)
AT_LEAST_TWO = WholeNumber(min=2)
NUMBER_OF_TIMES = WholeNumber(min=0)
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
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            return self._parse(value)
        except ValueError as error:
            return self.fail(f"{error}. Received: {_short(value)}", param, ctx)


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


def _algorithm(text: str) -> Algorithm | None:
    if text == "auto":
        return None
    name, _, levels = text.partition(":")
    inner, _, outer = levels.partition(",")
    try:
        if levels and name != "hierarchical":
            raise ValueError("Only a hierarchical algorithm has an inner and an outer")
        return Algorithm(name, inner or "ring", outer or "ring")
    except ValueError as error:
        raise ValueError(
            "it must be auto, ring, tree, halving_doubling, hierarchical, "
            "hierarchical:INNER,OUTER, or adasum"
        ) from error


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
# An algorithm of the all-reduce by its name; `None` for `auto`.
ALGORITHM = Checked("algorithm", _algorithm)
# A file that can be written, which is found out now and not after minutes.
OUTPUT_FILE = Checked("file", _output_file)


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
