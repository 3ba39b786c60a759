"""Command lines of the system's `ssh`, and what its ends mean."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from tfdp.launch.cli.hosts import Host

CONNECTION_LOST = 255
_NO_FOLDER = 96
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
CONNECT_SECONDS = 10
# Three unanswered questions end a connection.
_ALIVE_SECONDS = 5
# Never a question on the terminal, and nothing forwarded that a user has configured.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": str(_ALIVE_SECONDS),
    "ServerAliveCountMax": "3",
    "ClearAllForwardings": "yes",
    "LogLevel": "ERROR",
}
REMOTE_MODULE = "tfdp.launch.cli.remote"


def ssh_command(
    host: Host, python: str, folder: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command that starts the launcher of a host.

    Args:
        host: `Host`.
        python: String, path of its Python.
        folder: String, the working directory there.
        environ: Environment variables, of which `PYTHONPATH` is taken along. Defaults
            to `os.environ`.

    Returns:
        List of strings. The job's secret is not among them.
    """
    options = [word for pair in _OPTIONS.items() for word in ("-o", "=".join(pair))]
    path = environ.get("PYTHONPATH")
    variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    script = (
        f"cd {shlex.quote(folder)} || exit {_NO_FOLDER}; "
        f"{variables}exec {shlex.quote(python)} -m {REMOTE_MODULE}"
    )
    # The user's shell there may be any: only `sh` has to understand the rest.
    remote = f"exec sh -c {shlex.quote(script)}"
    return ["ssh", "-T", *options, host.target, remote]


def address_of(host: Host) -> str:
    """Return the name by which other machines reach a host.

    Args:
        host: `Host`, whose name may be an alias of the user's configuration of ssh.

    Returns:
        String, name or IP address.
    """
    try:
        done = subprocess.run(
            ["ssh", "-G", host.target],
            capture_output=True,
            text=True,
            timeout=CONNECT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    found = [line.split() for line in done.stdout.splitlines()]
    names = [words[1] for words in found if len(words) == 2 and words[0] == "hostname"]
    return names[0] if names else host.name


def describe_failure(
    host: Host, code: int, said: Sequence[str], python: str, folder: str
) -> str:
    """Say why the launcher of a host has not started.

    Args:
        host: `Host`.
        code: Int, exit code of ssh.
        said: Sequence of strings, the last lines of its errors.
        python: String, path of the Python there.
        folder: String, the working directory there.

    Returns:
        String, one sentence and what to do.

    Example:

    >>> describe_failure(Host("b"), 96, [], "python", "/work")
    'b has no folder /work: the script has to be at the same place on all hosts'
    """
    name, text = host.target, " ".join(said)
    last = said[-1].strip().rstrip(".") if said else "no reason given"
    if code == CONNECTION_LOST:
        return _describe_no_login(name, text, last)
    if code == _NO_FOLDER:
        return (
            f"{name} has no folder {folder}: the script has to be at the same place on "
            "all hosts"
        )
    if code in (_NOT_FOUND, _NOT_EXECUTABLE):
        return (
            f"{name} has no Python at {python}: install it there, or give its path "
            "with --remote-python"
        )
    if "No module named" in text:
        return (
            f"{name} has no tfdp, or another version of it, for {python}: install the "
            f"version of this machine there ({last})"
        )
    return f"The launcher on {name} has ended with code {code}: {last}"


def _describe_no_login(name: str, text: str, last: str) -> str:
    if "Permission denied" in text:
        return (
            f"{name} wants a password, or a key that ssh has not: `ssh-copy-id "
            f"{name}`, or start ssh-agent, until `ssh -o BatchMode=yes {name}` logs in "
            f"({last})"
        )
    if "Host key verification failed" in text:
        return (
            f"The key of {name} is not known, or has changed: log in once by "
            f"`ssh {name}` and see what it says ({last})"
        )
    if "Could not resolve" in text:
        return f"No host of the name {name} is known here ({last})"
    return f"{name} cannot be reached by ssh ({last})"
