"""Checks of the script of a command before any worker starts."""

from __future__ import annotations

import importlib.util
import os
import shlex
import stat
import sys
import warnings
import zipfile

import click

# These paths mean the standard input, which is empty for workers, so no script can be
# read from them.
_STANDARD_INPUT = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
# A file of more bytes than this is not a script, and would take long to compile, so it
# is refused.
_MAX_BYTES = 2**24


def check_program(script: str, is_module: bool) -> None:
    """Check that Python can run a script or a module.

    Otherwise each worker would fail with the same error.

    Args:
        script: String, the path of a script or the name of a module.
        is_module: Bool, whether `script` is the name of a module.

    Raises:
        click.UsageError: If Python cannot run it.
    """
    find_fault = _fault_of_module if is_module else _fault_of_script
    if fault := find_fault(script):
        raise click.UsageError(f"{fault}. Received: {script}")


def _fault_of_module(name: str) -> str | None:
    """Return why `python -m` cannot run a module, or `None` if it can.

    Nothing is imported: the module's top-level package must exist.
    """
    sys.path.insert(0, os.getcwd())  # `python -m` looks in this folder first
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is not None and not os.path.isfile(name):
        return None
    return (
        "There is no module of that name; give it as in `python -m`, or remove -m for "
        "a path"
    )


def _fault_of_script(script: str) -> str | None:
    """Return why Python cannot run a script by its path, or `None` if it can."""
    # For an invalid name, some methods of `Path` raise an error, so functions of
    # `os.path` are used, which return false.
    main = os.path.join(script, "__main__.py")
    what = ""
    if script in _STANDARD_INPUT:
        what = "is the standard input, which workers do not have"
    elif not os.path.exists(script):
        what = "does not exist"
    elif os.path.isdir(script) and not os.path.isfile(main):
        what = "is a folder"
    elif stat.S_ISCHR(mode := os.stat(script).st_mode) or stat.S_ISBLK(mode):
        what = "is a device"
    if what:
        return (
            f"The script {what}; give the path of a Python file, or -m and the name of "
            "a module"
        )
    if script.endswith(".ipynb"):
        return (
            "A notebook is not a script: convert it by `jupyter nbconvert --to script "
            f"{shlex.quote(script)}`, or train in the notebook itself, on the devices "
            "of this machine, by `tfdp.auto_strategy()`"
        )
    fault = _fault_of_source(script)
    return fault and f"The script to run is not valid Python: {fault}"


def check_platform(command: str) -> None:
    """Check that this is Linux, which local workers need.

    Args:
        command: String, command that would start workers, for the error.

    Raises:
        click.UsageError: If this is another system.
    """
    if sys.platform != "linux":
        raise click.UsageError(
            f"`{command}` needs Linux; elsewhere set TF_CONFIG for each worker and "
            f"start it yourself. Received: {sys.platform}"
        )


def _fault_of_source(script: str) -> str | None:
    """Return why a script cannot be compiled, or `None` if it can or is not source."""
    is_source = os.path.isfile(script) and not script.endswith(".pyc")
    if not is_source or zipfile.is_zipfile(script):
        return None
    try:
        with open(script, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show the same warnings
            source = file.read(_MAX_BYTES + 1)
            if len(source) > _MAX_BYTES:
                return f"it is larger than {_MAX_BYTES >> 20} MiB"
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or "").strip()
        shown = f", `{line}`" if line.isprintable() and 0 < len(line) <= 80 else ""
        place = f" in line {error.lineno}{shown}" if error.lineno else ""
        return f"{error.msg}{place}"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (ValueError, MemoryError, RecursionError) as error:
        return str(error) or type(error).__name__
    return None
