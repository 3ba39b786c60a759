"""Two hosts of this machine with an `sshd` each, and faults of a job on them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from tests.harness.commands import HEEDING, ROOT
from tools.bench import hosts_bed
from tools.bench.hosts_bed import INTERFACE, BedError, TwoHosts

DEADLINE_SECONDS = 120.0
SSHD = "/usr/sbin/sshd"
NAMES = ("host0", "host1")
PORT = 22
# sshd separates its privileges in a folder that its service makes at boot.
_PRIVILEGES = pathlib.Path("/run/sshd")
_SSHD_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication yes
PermitRootLogin prohibit-password
"""
_SSH_CONFIG = """
Host *
    IdentityFile {folder}/{key}
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/{known}
    StrictHostKeyChecking yes
{hosts}
"""
WAITS = """
import json, os, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""


def why_not() -> str:
    """Why there can be no such hosts here, or `""`."""
    if reason := hosts_bed.missing():
        return reason
    lacks = [name for name in ("ssh", "ssh-keygen") if shutil.which(name) is None]
    if not os.path.exists(SSHD):
        lacks.append("sshd")
    if lacks:
        return f"needs openssh-server and openssh-client. Missing: {', '.join(lacks)}"
    try:
        with TwoHosts():
            return ""
    except BedError as error:  # a container may be root and still not be allowed to
        return str(error)


class SshdBed:
    """Two hosts with an `sshd`, whose names are `host0` and `host1`.

    Args:
        bed: The two hosts.
        folder: For keys, scripts and logs.
    """

    def __init__(self, bed: TwoHosts, folder: pathlib.Path) -> None:
        self.bed = bed
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
            "PYTHONPATH": str(ROOT),
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
        }
        self.environment.pop("TF_CONFIG", None)
        for key in ("host_key", "user_key", "other_key"):
            self._keygen(key)
        hosts = zip(NAMES, bed.addresses, strict=True)
        lines = [f"Host {name}\n    HostName {address}" for name, address in hosts]
        host_key = (folder / "host_key.pub").read_text()
        known = "".join(f"{address} {host_key}" for address in bed.addresses)
        (folder / "known_hosts").write_text(known)
        (folder / "no_hosts").touch()
        self._hosts = "\n".join(lines)
        self.use()
        _PRIVILEGES.mkdir(exist_ok=True)
        self.daemons = [self._start_daemon(host) for host in range(2)]

    def use(self, key: str = "user_key", known: str = "known_hosts") -> None:
        """Let `ssh` use a key, and a file of the hosts that it knows."""
        config = self.folder / "ssh_config"
        config.write_text(
            _SSH_CONFIG.format(
                folder=self.folder, key=key, known=known, hosts=self._hosts
            )
        )
        program = self.folder / "bin" / "ssh"
        program.parent.mkdir(exist_ok=True)
        ssh = shutil.which("ssh", path=os.environ["PATH"])
        program.write_text(f'#!/bin/sh\nexec {ssh} -F {config} "$@"\n')
        program.chmod(0o755)

    def start(self, host: int, *arguments: str) -> subprocess.Popen:
        """Start `tfdp run` on a host, in the folder of the bed."""
        return self._start(host, "-m", "tfdp", "run", *arguments)

    def start_python(self, host: int, code: str) -> subprocess.Popen:
        """Run Python code on a host, in the folder of the bed."""
        return self._start(host, "-c", code)

    def _start(self, host: int, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*self.bed.enter(host), *HEEDING, sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def processes(self, host: int) -> list[psutil.Process]:
        """What runs on a host, but for `sshd` and its sessions."""
        command = ["ip", "netns", "pids", self.bed.names[host]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = []
        for pid in map(int, done.stdout.split()):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                is_running = process.status() != psutil.STATUS_ZOMBIE
                if is_running and process.name() not in ("sshd", "sshd-session"):
                    found.append(process)
        return found

    def sessions(self, host: int) -> list[psutil.Process]:
        """The processes of `sshd` that serve a connection."""
        return psutil.Process(self.daemons[host].pid).children(recursive=True)

    def wait_until_empty(self, seconds: float) -> float:
        """Wait until nothing of a job is left; return how long it took."""
        begin = time.monotonic()
        while left := [p for host in range(2) for p in self.processes(host)]:
            assert time.monotonic() - begin < seconds, left
            time.sleep(0.1)
        return time.monotonic() - begin

    def set_link(self, state: str) -> None:
        """Take the network of host 1 `down` or `up`."""
        name = self.bed.names[1]
        command = ["ip", "-n", name, "link", "set", INTERFACE, state]
        subprocess.run(command, check=True)
        if state == "up":
            for host in range(2):
                self._wait_for_daemon(host)

    def _keygen(self, name: str) -> None:
        path = str(self.folder / name)
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path]
        subprocess.run(command, check=True)

    def _start_daemon(self, host: int) -> subprocess.Popen:
        address = self.bed.addresses[host]
        config = self.folder / f"sshd_config_{host}"
        config.write_text(
            _SSHD_CONFIG.format(port=PORT, address=address, folder=self.folder)
        )
        daemon = subprocess.Popen(
            [*self.bed.enter(host), SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"sshd_{host}.log").open("w"),
        )
        self._wait_for_daemon(host)
        return daemon

    def _wait_for_daemon(self, host: int) -> None:
        """Wait until the `sshd` of a host answers to the other one."""
        address = self.bed.addresses[host]
        probe = f"import socket; socket.create_connection(({address!r}, {PORT}), 1)"
        deadline = time.monotonic() + DEADLINE_SECONDS
        command = [*self.bed.enter(1 - host), sys.executable, "-c", probe]
        while subprocess.run(command, capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, "sshd does not answer"


@contextlib.contextmanager
def sshd_bed(folder: pathlib.Path) -> Iterator[SshdBed]:
    """Make two hosts with an `sshd` each, which go with all that runs on them."""
    with TwoHosts("1gbit") as bed:
        sshds = SshdBed(bed, folder)
        try:
            yield sshds
        finally:
            for daemon in sshds.daemons:
                daemon.kill()
                daemon.wait()


def kill_worker(bed: SshdBed, pids: dict[int, int], launcher: subprocess.Popen) -> None:
    """Kill a worker on host 1."""
    os.kill(pids[1], signal.SIGKILL)


def kill_launcher(
    bed: SshdBed, pids: dict[int, int], launcher: subprocess.Popen
) -> None:
    """Kill the launcher of host 1 and the sessions of its `sshd`."""
    remote = [p for p in bed.processes(1) if "tfdp.launch.cli.remote" in p.cmdline()]
    for process in [*remote, *bed.sessions(1)]:
        with contextlib.suppress(psutil.Error):
            process.kill()


def cut_network(bed: SshdBed, pids: dict[int, int], launcher: subprocess.Popen) -> None:
    """Cut the link between the hosts."""
    bed.set_link("down")


def close_terminal(
    bed: SshdBed, pids: dict[int, int], launcher: subprocess.Popen
) -> None:
    """Send what a terminal sends to its programs when it is closed."""
    launcher.send_signal(signal.SIGHUP)


def kill_terminal(
    bed: SshdBed, pids: dict[int, int], launcher: subprocess.Popen
) -> None:
    """Kill the launcher that was started from the terminal."""
    launcher.kill()


Fault = Callable[[SshdBed, dict[int, int], subprocess.Popen], None]
# By name: the fault, the exit code, and what stands in the output once.
FAULTS: dict[str, tuple[Fault, int, str]] = {
    "worker": (kill_worker, 137, r"worker 1 on node 1 \(.*was killed by SIGKILL"),
    "host": (kill_launcher, 69, "(node 1|the connection to host1).* was lost"),
    "network": (cut_network, 69, "(node 1|the connection to host1).* was lost"),
    "terminal": (close_terminal, 129, "SIGHUP received, stopping the worker"),
    "launcher": (kill_terminal, -9, ""),
}
# Those that a sentence explains, once.
NAMED = ("worker", "host", "network")


def strike(bed: SshdBed, name: str) -> tuple[int, str, float, float]:
    """Start a job on both hosts, let a fault happen, and wait until all is over.

    Args:
        bed: The hosts.
        name: Of the fault.

    Returns:
        The exit code, the output from the fault on, and the seconds from the fault to
        the end of the launcher, and from there until nothing was left.
    """
    script = bed.folder / "waits.py"
    script.write_text(WAITS)
    launcher = bed.start(0, "--hosts", "host0:1,host1:1", script.name)
    try:
        pids = _read_pids(launcher)
        begin = time.monotonic()
        FAULTS[name][0](bed, pids, launcher)
        output, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
        ended = time.monotonic() - begin
        left = bed.wait_until_empty(DEADLINE_SECONDS)
    finally:
        launcher.kill()
        launcher.wait()
        if name == "network":
            bed.set_link("up")
    return launcher.returncode, output, ended, left


def _read_pids(launcher: subprocess.Popen) -> dict[int, int]:
    """The process of each worker, once all are there."""
    pids: dict[int, int] = {}
    assert launcher.stdout is not None
    seen = ""
    while len(pids) < 2:
        line = launcher.stdout.readline()
        seen += line
        assert line, seen
        words = shlex.split(line.replace("'", ""))
        if words[:1] == ["[worker"] and words[2:3] == ["ready"]:
            pids[int(words[1].rstrip("]"))] = int(words[3])
    return pids
