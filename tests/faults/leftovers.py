"""What a job has left behind: processes, ports, files; and whether saves are there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import threading
from pathlib import Path

import psutil

from tests.faults.damage import backups, step_of
from tfdp.checkpoint import files
from tfdp.checkpoint.index_file import load_index
from tfdp.checkpoint.object_store import open_storage

Event = tuple[float, str, str]
_CHECKPOINT = r"(/index\.json|/data-[0-9a-f]{12}(/.*)?)?"
# The ledger of time, which stays.
_LEDGER = "backup.goodput.jsonl"
# What a job that was cut short may leave where it saves; the next one clears it away.
_MAY_BE = re.compile(
    rf"checkpoint{_CHECKPOINT}"
    rf"|backup(/\.tfdp-probe-[0-9a-f-]+|/\.run-[0-9a-f]+|/step-\d+{_CHECKPOINT})?"
)
# TensorFlow removes what it generates at the end of a process, if that has an end.
_GENERATED = re.compile(r"__autograph_generated_file.*")


def read_events(notes: str, rank: int) -> list[Event]:
    """What a worker has noted."""
    path = Path(notes, f"{rank}.events")
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def processes_of(sessions: set[int]) -> list[int]:
    """The processes that are alive in the sessions of workers, children too."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and os.getsid(process.pid) in sessions:
                found.append(process.pid)
    return found


def of_this_process() -> str:
    """Threads, sockets and memory files of tfdp that outlive the end of a script."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("tfdp")]
    # TensorFlow's own are none of Python's.
    sockets = [
        str(each)
        for each in gc.get_objects()
        if isinstance(each, socket.socket) and each.fileno() >= 0
    ]
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    files = [str(link.readlink()) for link in links if link.is_symlink()]
    memory = [name for name in files if name.startswith("/memfd:")]
    return ", ".join(threads + sockets + memory)


def kill_all(sessions: set[int]) -> None:
    """Ends what is alive in the sessions of workers."""
    for pid in processes_of(sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def problem_of_ports(addresses: tuple[str, ...]) -> str:
    """Whether a port is still taken on this host."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        if host != "127.0.0.1":
            continue  # of a host that has no process any more
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                return f"port {port} is still taken: {error}"
    return ""


def problem_of_files(state: Path, *, is_done: bool) -> str:
    """Whether there are files where nobody needs them.

    Args:
        state: Path of the folder for what is saved.
        is_done: Bool, whether the job has come to its end, and so has cleared away.
    """
    names = sorted(str(path.relative_to(state)) for path in state.rglob("*"))
    names = [name for name in names if name != _LEDGER]
    if not is_done:
        strange = [name for name in names if not _MAY_BE.fullmatch(name)]
        return f"files are left: {strange}" if strange else ""
    wanted = _files_of_checkpoint(state / "checkpoint")
    return "" if names == wanted else f"there are {names} instead of {wanted}"


def problem_of_temporary_files(folder: Path, *, was_killed: bool) -> str:
    """Whether a worker has left temporary files.

    Args:
        folder: Path of its folder for such.
        was_killed: Bool, whether it had no chance to remove what TensorFlow makes.
    """
    names = [path.name for path in folder.iterdir()]
    if was_killed:
        names = [name for name in names if not _GENERATED.fullmatch(name)]
    return f"temporary files are left: {names}" if names else ""


def problem_of_saves(events: list[list[Event]], state: Path) -> str:
    """What was reported saved has to be there, whole, or something newer."""
    noted = [event for of_worker in events for event in of_worker]
    try:
        return _problem_of_checkpoint(noted, state) or _problem_of_backups(noted, state)
    except (OSError, ValueError) as error:
        return f"what was saved is lost: {error}"


def _problem_of_checkpoint(noted: list[Event], state: Path) -> str:
    tokens = [text for _, event, text in sorted(noted) if event == "saved"]
    if not tokens:
        return ""
    token = _check(state / "checkpoint")
    is_older = token in tokens and token != tokens[-1]
    return f"the checkpoint is {token}, and of {tokens}" if is_older else ""


def _problem_of_backups(noted: list[Event], state: Path) -> str:
    steps = [int(text) for _, event, text in noted if event == "backup"]
    if not steps or any(event == "deleted" for _, event, _ in noted):
        return ""  # `fit` had come to its end
    found = backups(state)
    for path in found:
        _check(path)
    newest = step_of(found[-1]) if found else 0
    return "" if newest >= max(steps) else f"backup {max(steps)} is not in {found}"


def _check(directory: Path) -> str:
    """Raises if a checkpoint is not whole, and returns which one it is."""
    index = load_index(str(directory))
    folder = open_storage(str(directory)).below(index.token)
    for shard in index.shards:
        files.read_data(shard, folder, index.algorithm)
    return index.token


def _files_of_checkpoint(directory: Path) -> list[str]:
    index = load_index(str(directory))
    name, data = directory.name, f"{directory.name}/{index.token}"
    listed = [f"{data}/{file.name}" for part in index.shards for file in part.files]
    return sorted([name, f"{name}/index.json", data, *listed])
