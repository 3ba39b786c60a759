"""Identity of a process, by which others of its machine see whether it runs."""

from __future__ import annotations

import dataclasses
import os
import pathlib

ENDED = frozenset("ZXx")


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """A process among all those of a machine since its boot.

    A port can outlive the process that opened it: a forked process may hold it.

    Args:
        machine: String, the boot of the kernel, the namespace of process ids and the
            user, or `""` where the system does not tell.
        pid: Int.
        started: String, ticks from the boot to the start: ids are given again.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        _, started = state_and_start(os.getpid())
        return cls(machine(), os.getpid(), started)

    def has_ended(self) -> bool:
        """Return whether it is known that the process does not run any more.

        Returns:
            Bool; `False` on another machine, from which nothing is known.
        """
        if not self.machine or self.machine != machine():
            return False
        state, started = state_and_start(self.pid)
        return state in ENDED or started != self.started


def machine() -> str:
    """Return the boot of the kernel, the process ids and the user, or `""`."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        # Those of another user may be hidden.
        return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Read a process's state and start; `"X"` and `""` if there is none."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    # The name of the program, in parentheses, may have spaces.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
