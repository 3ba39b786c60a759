"""Several `tfdp run` of one job on this machine, as the launchers of its nodes."""

from __future__ import annotations

import pathlib
import subprocess
import threading

from tests.cli.launcher import DEADLINE_SECONDS, Launcher
from tfdp.communication.cluster import free_ports

SECRET = "0123456789abcdef"


class Nodes(Launcher):
    """Runs `tfdp run --nodes` in a folder, several times for one job."""

    def __init__(self, folder: pathlib.Path, nodes: int = 2) -> None:
        super().__init__(folder)
        self.count = str(nodes)
        self.place = f"127.0.0.1:{free_ports(1)[0]}"
        secret = folder / "secret"
        secret.write_text(SECRET, "utf-8")
        secret.chmod(0o600)
        self.environment["TFDP_JOB_SECRET_FILE"] = str(secret)
        self.environment["HOME"] = str(folder)

    def node(self, *arguments: str, **options) -> subprocess.Popen:
        return self.start(
            *("--nodes", self.count, "--rendezvous", self.place),
            *arguments,
            **options,
        )

    def start_both(self, *arguments: str) -> list[subprocess.Popen]:
        """Run the same line as nodes 0 and 1."""
        return [self.node("--node-rank", str(rank), *arguments) for rank in range(2)]

    def both_ready(
        self, *arguments: str, word: str = "ready"
    ) -> list[subprocess.Popen]:
        """Run the same line, with a worker on each, until both say a word."""
        started = self.start_both(*arguments)
        for rank, process in enumerate(started):
            read_until(process, f"[worker {rank}] {word}")
        return started

    def both(self, *arguments: str) -> list[tuple[int, str]]:
        """Run the same line as nodes 0 and 1; return their codes and outputs."""
        return [ended(process) for process in self.start_both(*arguments)]


def ended(
    process: subprocess.Popen, seconds: float = DEADLINE_SECONDS
) -> tuple[int, str]:
    """Wait for a launcher; return its code and output."""
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def read_until(process: subprocess.Popen, words: str) -> str:
    """Read the output of a launcher up to a line with these words."""
    output = ""
    # Of one that is silent no line is read: it is killed, which ends its output.
    timer = threading.Timer(DEADLINE_SECONDS, process.kill)
    timer.start()
    try:
        while line := process.stdout.readline():
            output += line
            if words in line:
                return output
        raise AssertionError(f"{words!r} is not in {output!r}")
    finally:
        timer.cancel()
