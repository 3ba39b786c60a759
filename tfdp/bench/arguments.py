"""Values of the command line that benchmarks share: lists, sizes, files."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import click

_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[KMG]?B?)", re.IGNORECASE)


class ManyValues(click.Command):
    """A command of which an option can have many values: `--models 1 5 20`.

    The options are those with `multiple=True`. A value ends at the next option,
    and in a command with arguments also at what is no number.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Writes the option before each of its values, as click wants it."""
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


def size(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A number of bytes, such as `4KB` or `64 MB` (units of 1024)."""
    return _size(value)


def sizes(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> list[int]:
    """Numbers of bytes."""
    return [_size(text) for text in value]


def _size(value: str) -> int:
    match = _SIZE.fullmatch(value.strip())
    unit = match["unit"].upper() if match else ""
    unit += "B" if unit and not unit.endswith("B") else ""
    num_bytes = int(float(match["number"]) * _UNITS[unit]) if match else 0
    if num_bytes < 1:
        raise click.BadParameter(
            "it must be a size of at least 1 byte, such as 65536, 64KB or 1MB. "
            f"Received: {value}"
        )
    return num_bytes


def counts(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> list[int]:
    """Whole numbers of at least 1."""
    for text in value:
        if not (text.isdecimal() and int(text) >= 1):
            raise click.BadParameter(
                f"they must be whole numbers of at least 1. Received: {text}"
            )
    return [int(text) for text in value]


def pairs(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A whole number of at least 2: of several rivals one is chosen in half of them."""
    return _at_least_two(value)


def factor(context: click.Context, parameter: click.Parameter, value: str) -> int:
    """A whole number of at least 2."""
    return _at_least_two(value)


def _at_least_two(value: str) -> int:
    if not (value.isdecimal() and int(value) >= 2):
        raise click.BadParameter(
            f"it must be a whole number of at least 2. Received: {value}"
        )
    return int(value)


def geometric(first: int, last: int, factor: int) -> list[int]:
    """Sizes from one to another.

    Args:
        first: Int, the smallest.
        last: Int, the largest or a little more.
        factor: Int, what each is multiplied by.

    Returns:
        List of int.

    Raises:
        click.UsageError: If there is none.

    Example:

    >>> geometric(1024, 20000, 4)
    [1024, 4096, 16384]
    """
    if last < first:
        raise click.UsageError(
            "The smallest size is larger than the largest. "
            f"Received: --min-bytes {first} --max-bytes {last}"
        )
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def millions(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> list[float]:
    """Numbers of parameters, in millions."""
    for text in value:
        if not (_is_number(text) and 0 < float(text) < float("inf")):
            raise click.BadParameter(
                f"they must be millions of parameters, above 0. Received: {text}"
            )
    return [float(text) for text in value]


def file_to_write(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> Path | None:
    """A file that can be written: found out now, not after minutes."""
    if value is None:
        return None
    path = Path(value)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else "lies in a folder that is not there"
        raise click.BadParameter(f"the file {what}. Received: {value}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"the file cannot be written. Received: {value}")
    return path


def new_file(name: str, suffix: str) -> Path:
    """A file in ./tfdp-bench that is not there yet.

    Args:
        name: String, of the benchmark.
        suffix: String, such as `".json"`.

    Returns:
        Path.

    Raises:
        click.UsageError: If the folder cannot be written.
    """
    folder = Path("tfdp-bench")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise click.UsageError(
            f"The folder {folder} cannot be made ({error.strerror}); say with --json "
            "and --plot where results go."
        ) from error
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}"
