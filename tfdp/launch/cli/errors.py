"""Errors in one sentence, including those of the late import of TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from tfdp.launch.cli.noise import quiet_stderr

# The first line of an error may be very long, with its cause at either end, so this
# many characters are kept at each end.
_MAX_LETTERS = 400


@contextlib.contextmanager
def usage_errors(
    *kinds: type[Exception],
    text_of: Callable[[BaseException], str] = str,
    raises: type[click.ClickException] = click.UsageError,
) -> Iterator[None]:
    """Replace expected errors in the context by click's, printed without a traceback.

    Args:
        *kinds: Classes of the expected errors. Defaults to `ValueError`.
        text_of: Callable that maps an error to its text. Defaults to `str`.
        raises: Class of the error in place of an expected one. Defaults to
            `click.UsageError`, which may get a hint to the help of the command.
    """
    expected = kinds or (ValueError,)
    try:
        yield
    except expected as error:
        raise raises(text_of(error)) from error


def import_without_gpus(name: str) -> Any:
    """Import a module that needs TensorFlow, for a command that needs no GPU.

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

            # The GPUs are hidden, since a training job that is running may need them.
            # `RuntimeError` means that TensorFlow has already initialized its devices,
            # so GPUs cannot be hidden any more.
            with contextlib.suppress(RuntimeError):
                tf.config.set_visible_devices([], "GPU")
            return importlib.import_module(name)
    except Exception as error:  # a broken package raises anything
        raise click.ClickException(
            f"TensorFlow cannot be imported: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without a full stop at its end.

    A line of more than 805 characters is cut in the middle.
    """
    # Lone surrogates cannot be printed, so they are escaped.
    text = str(error).encode("utf-8", "backslashreplace").decode()
    lines = text.strip().splitlines() or [type(error).__name__]
    line = lines[0].strip().rstrip(".:")
    cut = f"{line[:_MAX_LETTERS]} ... {line[-_MAX_LETTERS:]}"
    return min(line, cut, key=len)
