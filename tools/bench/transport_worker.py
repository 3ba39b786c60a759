"""One process of the communicators of the transport, without TensorFlow."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.communication.transport import (
    Communicator,
    Mesh,
    SharedMemoryCommunicator,
    SocketCommunicator,
)
from tfdp.launch.bench.channel import Variant, Variants, work
from tools.bench.meters import metered


class FolderStore:
    """Store whose keys are files of a folder, a `Store` of the transport.

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
    lanes: Sequence[Communicator], lengths: Sequence[int]
) -> Callable[[], None]:
    """Sums of float32 arrays into others, each on a lane of its own, as in the graph.

    Args:
        lanes: Sequence of `Communicator`s, at least as many as arrays.
        lengths: Sequence of ints, elements of each array.

    Returns:
        Callable.
    """
    arrays = [np.ones(length, np.float32) for length in lengths]
    sums = [np.empty_like(array) for array in arrays]
    threads = futures.ThreadPoolExecutor(len(arrays))

    def step() -> None:
        if len(arrays) == 1:
            lanes[0].all_reduce(arrays[0], 0, sums[0])
            return
        started = [
            threads.submit(lane.all_reduce, array, 0, into)
            for lane, array, into in zip(lanes, arrays, sums, strict=False)
        ]
        for each in started:
            each.result()

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


def make_variants(setup: dict[str, Any]) -> Variants:
    """Make a variant `wire/size` for each communicator and each size of `variants`."""
    num_lanes = max(map(len, setup["variants"].values()))
    variants: dict[str, Variant] = {}
    for wire, new_communicator in communicators(setup).items():
        lanes = [new_communicator(f"{wire}/{lane}") for lane in range(num_lanes)]
        for name, lengths in setup["variants"].items():
            variants[f"{wire}/{name}"] = metered(all_reduce_step(lanes, lengths))
    return variants


if __name__ == "__main__":
    work(make_variants)
