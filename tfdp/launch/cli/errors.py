"""Errors in one sentence, also of a late import of TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from tfdp.launch.cli.noise import quiet_stderr

# Of each end of a line.
_MOST_LETTERS = 400


@contextlib.contextmanager
def usage_errors(
    *kinds: type[Exception], text_of: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Report expected errors as those of the command line.

    Args:
        *kinds: Classes of these errors. Defaults to `ValueError`.
        text_of: Callable, what is said of one. Defaults to `str`.

    Raises:
        click.UsageError: In place of such an error.
    """
    expected = kinds or (ValueError,)
    try:
        yield
    except expected as error:
        raise click.UsageError(text_of(error)) from error


def import_without_gpus(name: str) -> Any:
    """A module that needs TensorFlow, for a command that computes next to nothing.

    Args:
        name: String, full name of the module.

    Returns:
        The module.

    Raises:
        click.ClickException: If TensorFlow cannot be imported.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with quiet_stderr():
            import tensorflow as tf

            # They may be somebody else's.
            with contextlib.suppress(RuntimeError):  # they are in use already
                tf.config.set_visible_devices([], "GPU")
            return importlib.import_module(name)
    except Exception as error:  # a broken one raises anything
        raise click.ClickException(
            f"TensorFlow cannot be imported: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """First line of an error, without a full stop; the middle of a long one is cut."""
    text = str(error).encode("utf-8", "backslashreplace").decode()  # can be printed
    lines = text.strip().splitlines() or [type(error).__name__]
    line = lines[0].strip().rstrip(".:")
    cut = f"{line[:_MOST_LETTERS]} ... {line[-_MOST_LETTERS:]}"
    return min(line, cut, key=len)
