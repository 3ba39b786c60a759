"""Workers that are the ranks of one job of MPI: this module is also their program."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import pathlib
import socket
import subprocess
import sys

import psutil

from tests.harness import mpi
from tests.harness.setups import Setup
from tests.harness.worker import serve

# The ranks call before they load TensorFlow.
_CALLING_SECONDS = 60.0
_SOCKET = "ranks.socket"

Rank = tuple["RankProcess", multiprocessing.connection.Connection]


class RankProcess:
    """The process of a rank, which ends with the launcher, and the launcher with it."""

    def __init__(self, pid: int, launcher: subprocess.Popen):
        self.pid = pid
        self._process, self._launcher = psutil.Process(pid), launcher

    @property
    def exitcode(self) -> int | None:
        """That of the launcher, or `None` while the rank runs."""
        return None if self.is_alive() else self._launcher.poll()

    def is_alive(self) -> bool:
        """Whether the rank runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def join(self) -> None:
        """Ends the job: without one rank it is of no use."""
        _end(self._launcher)


def start_ranks(setup: Setup, flavor: str, folder: pathlib.Path) -> list[Rank]:
    """Starts the ranks of a set-up and waits for their calls, in their order."""
    with (
        socket.socket(socket.AF_UNIX) as listener,
        (folder / "launcher.log").open("wb") as log,
    ):
        listener.bind(str(folder / _SOCKET))
        listener.listen()
        listener.settimeout(_CALLING_SECONDS)
        launcher = subprocess.Popen(
            [
                *mpi.options(setup.num_workers),
                *(sys.executable, "-m", __name__, setup.name, flavor, str(folder)),
            ],
            cwd=mpi.ROOT,
            env={**os.environ, **mpi.ENVIRONMENT, "KERAS_BACKEND": "tensorflow"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            return _accept(listener, launcher, setup.num_workers)
        except BaseException:
            _end(launcher)
            raise


def _accept(
    listener: socket.socket, launcher: subprocess.Popen, num_ranks: int
) -> list[Rank]:
    found: dict[int, Rank] = {}
    while len(found) < num_ranks:
        accepted, _ = listener.accept()
        accepted.setblocking(True)
        connection = multiprocessing.connection.Connection(accepted.detach())
        rank, pid = connection.recv()
        found[rank] = RankProcess(pid, launcher), connection
    return [found[rank] for rank in range(num_ranks)]


def _end(launcher: subprocess.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(launcher.pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    launcher.wait()


def _main() -> None:
    from tests.harness.cluster import files_of
    from tfdp.communication.cluster.launchers import mpi_rank

    setup, flavor, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    own = mpi_rank()
    assert own is not None
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(str(folder / _SOCKET))
    connection = multiprocessing.connection.Connection(caller.detach())
    connection.send((own.rank, os.getpid()))
    serve(setup, own.rank, flavor, connection, None, *files_of(folder, own.rank))


if __name__ == "__main__":
    _main()
