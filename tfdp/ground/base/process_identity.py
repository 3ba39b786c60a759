"""Identity of a process, by which other processes see whether it still runs."""

from __future__ import annotations

import dataclasses
import os
import pathlib

# Linux lists a process that has ended until its parent has read the exit status. The
# state in `/proc/PID/stat` is then one of these letters, Z for a zombie.
ENDED = frozenset("ZXx")


@dataclasses.dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process, unique among all processes of a machine since its boot.

    An open port does not prove that a process runs: its forked process may have the
    port.

    Args:
        machine: String with the boot of the kernel, the namespace of process ids and
            the user, or `""` if the system does not provide them.
        pid: Int, the process id.
        started: String, ticks from the boot to the start of the process, because
            process ids are reused.
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
        """Return whether the process is known to have ended.

        Returns:
            Bool; `False` if the process belongs to another machine.
        """
        if not self.machine or self.machine != machine():
            return False
        state, started = state_and_start(self.pid)
        return state in ENDED or started != self.started


def boot_id() -> str:
    """Return the id of this boot of the machine.

    Raises:
        OSError: If the system does not have one.
    """
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def machine() -> str:
    """Return a text of boot id, namespace of process ids and user; `""` if unknown."""
    try:
        # The user is part of the identity, since `/proc` may hide the processes of
        # other users, which would then seem to have ended.
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """Read a process's state and the time of its start.

    Args:
        pid: Int, the process id.

    Returns:
        Tuple of two strings: Linux's letter for the state, and the ticks from the boot
        to the start; `"X"` and `""` if the process does not exist.
    """
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return "X", ""
    # The second field of `/proc/PID/stat` is the program's name in parentheses, which
    # may contain spaces, so only the text after it is split.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
