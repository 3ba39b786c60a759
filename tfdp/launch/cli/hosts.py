"""Hosts of `--hosts` and `--hostfile`, with the number of workers of each."""

from __future__ import annotations

import dataclasses
import os
import re

from tfdp.communication.cluster.address import is_local_name
from tfdp.ground.text import pluralize

_MAX_HOSTS = 1024
# A file that is given by mistake may be huge, so only this many bytes of a hostfile are
# read.
_MAX_BYTES = 1 << 20
# Matches `USER@NAME:COUNT`. A name must not begin with a dash, since ssh would take it
# for an option.
_HOST = re.compile(
    r"(?:(?P<user>[\w.][\w.-]*)@)?"
    r"(?P<name>\[[0-9a-fA-F:.]+(?:%\w+)?\]|[A-Za-z0-9_][\w.-]*)"
    r"(?::(?P<count>[0-9]{1,6}))?"
)
# Matches `host slots=4`, so hostfiles of Open MPI can be used as they are.
_SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]{1,6})")


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that is reached by ssh.

    Args:
        name: String, name or IP address that ssh knows.
        user: String, user on that machine, or `None` for ssh's default.
        num_workers: Int, number of workers of the machine, or `None` if not specified.
    """

    name: str
    user: str | None = None
    num_workers: int | None = None

    @property
    def target(self) -> str:
        """String, `NAME` or `USER@NAME`, the destination on the command line of ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the value of `--hosts`.

    Args:
        text: String, the value, such as `"a:4,me@b:4"`.

    Returns:
        Tuple of `Host`.

    Raises:
        ValueError: If the value is malformed; the text says what it must be.

    Example:

    >>> parse_hosts("a:4,me@b")[1]
    Host(name='b', user='me', num_workers=None)
    """
    return _checked([_parse(word.strip()) for word in text.split(",")])


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read the file of `--hostfile`.

    Each line is `HOST`, `HOST:N` or `HOST slots=N`; a comment begins with `#`.

    Args:
        path: String, path of the file.

    Returns:
        Tuple of `Host`.

    Raises:
        ValueError: If the file cannot be read or is malformed; the text says why.
    """
    try:
        if os.path.isdir(path):
            raise OSError(0, "it is a folder")
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except OSError as error:
        raise ValueError(f"the hostfile cannot be read: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        if not (word := line.partition("#")[0].strip()):
            continue
        if slots := _SLOTS.fullmatch(word):
            word = f"{slots[1]}:{slots[2]}"
        try:
            hosts.append(_parse(word))
        except ValueError as error:
            raise ValueError(f"line {number} of the hostfile: {error}") from error
    if not hosts:
        raise ValueError("the hostfile names no host")
    return _checked(hosts)


def _parse(word: str) -> Host:
    """Parse `USER@NAME:COUNT`, user and count being optional, or raise `ValueError`."""
    match = _HOST.fullmatch(word)
    count = None if match is None or match["count"] is None else int(match["count"])
    if match is None or count == 0:
        raise ValueError(
            "a host must be HOST or HOST:N, with N workers, as in host0:4,me@host1:4; "
            f"{word[:80]!r} is not"
        )
    return Host(match["name"].strip("[]"), match["user"], count)


def _checked(hosts: list[Host]) -> tuple[Host, ...]:
    """Return the hosts as a tuple after checks of all of them together.

    Raises:
        ValueError: If there are too many, if one is named twice, or if the first has a
            name such as `localhost` that means another machine on the others.
    """
    if len(hosts) > _MAX_HOSTS:
        raise ValueError(f"there must be at most {pluralize(_MAX_HOSTS, 'host')}")
    seen: set[str] = set()
    for host in hosts:
        name = host.name.lower().rstrip(".")
        if name in seen:
            raise ValueError(
                f"each host must be named once, with all of its workers; {host.name!r} "
                "is named twice"
            )
        seen.add(name)
    if is_local_name(hosts[0].name) and not all(is_local_name(h.name) for h in hosts):
        raise ValueError(
            f"the first host must have a name by which the others reach it; "
            f"on each host, {hosts[0].name!r} is that host itself"
        )
    return tuple(hosts)
