"""Command lines of the system's `ssh`, and descriptions of its failures."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from tfdp.launch.cli.hosts import Host

# ssh exits with this code if the connection has failed, otherwise with that of the
# remote command.
CONNECTION_LOST = 255
# A missing working directory on the host has a separate exit code, which neither ssh
# nor a shell uses, so the error can name the directory.
_NO_FOLDER = 96
# A shell exits with these codes if a command cannot be executed, or does not exist, so
# on a host they mean that Python is missing.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
# A host that is switched off does not answer at all, so an attempt to connect ends
# after this many seconds.
CONNECT_SECONDS = 10
# ssh ends a connection after three unanswered keepalive messages, one every this many
# seconds, so that a lost host is noticed.
_ALIVE_SECONDS = 5
# ssh must not ask for a password, since there is no terminal, and must not forward
# ports, which a user may have configured.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": str(_ALIVE_SECONDS),
    "ServerAliveCountMax": "3",
    "ClearAllForwardings": "yes",
    "LogLevel": "ERROR",
}
# ssh has the same exit code for all failed connections, so words of its error select
# the description.
_CONNECTION_FAILURES = {
    "Permission denied": "{name} requires a password or a key that ssh does not have: "
    "`ssh-copy-id {name}`, or start ssh-agent, until `ssh -o BatchMode=yes {name}` "
    "logs in",
    "Host key verification failed": "The host key of {name} is not known, or has "
    "changed: log in once by `ssh {name}` and check it",
    "Could not resolve": "The host name {name} does not resolve here",
}
# The module is named by a string, since it runs on the hosts, by `python -m`.
REMOTE_MODULE = "tfdp.launch.cli.remote"


def ssh_command(
    host: Host, python: str, folder: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the command line that starts the launcher of a host.

    Args:
        host: `Host` to start it on.
        python: String, path of Python on the host.
        folder: String, working directory on the host.
        environ: Mapping of environment variables, whose `PYTHONPATH` is also set on the
            host. Defaults to `os.environ`.

    Returns:
        List of strings, without the job's secret.
    """
    options = [word for pair in _OPTIONS.items() for word in ("-o", "=".join(pair))]
    path = environ.get("PYTHONPATH")
    variables = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    script = (
        f"cd {shlex.quote(folder)} || exit {_NO_FOLDER}; "
        f"{variables}exec {shlex.quote(python)} -m {REMOTE_MODULE}"
    )
    # The login shell of the host only has to start `sh`, so it may be any shell.
    remote = f"exec sh -c {shlex.quote(script)}"
    return ["ssh", "-T", *options, host.target, remote]


def address_of(host: Host) -> str:
    """Return the name by which other machines reach a host.

    Args:
        host: `Host`, whose name may be an alias in the user's ssh configuration.

    Returns:
        String, the real name or IP address.
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
    lines = [line.split() for line in done.stdout.splitlines()]
    names = [words[1] for words in lines if len(words) == 2 and words[0] == "hostname"]
    return names[0] if names else host.name


def describe_failure(
    host: Host, code: int, said: Sequence[str], python: str, folder: str
) -> str:
    """Describe why the launcher of a host has not started.

    Args:
        host: `Host` that was tried.
        code: Int, exit code of ssh.
        said: Sequence of strings, the last lines of ssh's stderr.
        python: String, path of Python on the host.
        folder: String, working directory on the host.

    Returns:
        String, the reason and what to do about it.

    Example:

    >>> describe_failure(Host("b"), 96, [], "python", "/work")
    'b has no folder /work: the script has to be at the same place on all hosts'
    """
    name, text = host.target, " ".join(said)
    last = said[-1].strip().rstrip(".") if said else "no reason given"
    if code == CONNECTION_LOST:
        failures = (
            each for words, each in _CONNECTION_FAILURES.items() if words in text
        )
        sentence = next(failures, "{name} cannot be reached by ssh")
        return f"{sentence.format(name=name)} ({last})"
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
    return f"The launcher on {name} exited with code {code}: {last}"
