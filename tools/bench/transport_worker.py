"""One process of the communicators of `tfdp.transport`, without TensorFlow."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.bench.channel import Arm, Arms, work
from tfdp.transport import (
    Communicator,
    Mesh,
    SharedMemoryCommunicator,
    SocketCommunicator,
)
from tools.bench.metered import metered


class FolderStore:
    """Store whose keys are files of a folder, see `tfdp.transport.Store`.

    Args:
        folder: `Path`, which all workers share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, text: str) -> None:
        """See `Store`."""
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(text, "utf-8")
        partial.rename(path)

    def get(self, key: str, timeout_seconds: float) -> str:
        """See `Store`."""
        path = self._path(key)
        deadline = time.monotonic() + timeout_seconds
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(key)
            time.sleep(0.01)
        return path.read_text("utf-8")

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "%")


def all_reduce_step(
    communicator: Communicator, lengths: Sequence[int]
) -> Callable[[], None]:
    """Sums of float32 arrays, one after the other, into others, as the graph asks.

    Args:
        communicator: `Communicator`.
        lengths: Sequence of ints, elements of each array.

    Returns:
        Callable.
    """
    arrays = [np.ones(length, np.float32) for length in lengths]
    sums = [np.empty_like(array) for array in arrays]

    def step() -> None:
        for tag, (array, into) in enumerate(zip(arrays, sums, strict=True)):
            communicator.all_reduce(array, tag, into)

    return step


def communicators(setup: dict[str, Any]) -> dict[str, Callable[[str], Communicator]]:
    """What makes the communicator of each wire, from the name of its lane."""
    rank, num_workers = setup["rank"], len(setup["addresses"])
    meshes = {}
    for wire in ("unix", "tcp"):
        folder = Path(setup["folder"]) / wire
        folder.mkdir(exist_ok=True)
        meshes[wire] = Mesh(
            rank,
            num_workers,
            FolderStore(folder),
            host="localhost",
            use_unix=wire == "unix",
        )
    members = range(num_workers)
    made: dict[str, Callable[[str], Communicator]] = {
        wire: functools.partial(SocketCommunicator, mesh, members)
        for wire, mesh in meshes.items()
    }
    made["memory"] = functools.partial(
        SharedMemoryCommunicator, meshes["unix"], members
    )
    for chunks_bytes in setup["chunks_bytes"]:
        made[f"memory, {chunks_bytes}"] = functools.partial(
            SharedMemoryCommunicator,
            meshes["unix"],
            members,
            chunks_bytes=chunks_bytes,
        )
    return made


def make_arms(setup: dict[str, Any]) -> Arms:
    """Make an arm `wire/size` for each communicator and each size of `arms`."""
    arms: dict[str, Arm] = {}
    for wire, new_communicator in communicators(setup).items():
        communicator = new_communicator(wire)
        for name, lengths in setup["arms"].items():
            arms[f"{wire}/{name}"] = metered(all_reduce_step(communicator, lengths))
    return arms


if __name__ == "__main__":
    work(make_arms)
