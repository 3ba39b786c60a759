"""Checkpoints and backups whose files were written by hand, with checksums that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfdp.checkpoint import api, index_file
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.reader import LoadPlan
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

VALUES = {
    "dense/kernel": np.arange(40, dtype="float32").reshape(8, 5),
    "dense/bias": np.arange(5, dtype="float16"),
    "iterations": np.asarray(7, "int64"),
}


def state(values: dict[str, np.ndarray]) -> list[StateTensor]:
    """Tensors of one process that read and write these arrays."""
    return [_tensor(name, array) for name, array in values.items()]


def _tensor(name: str, array: np.ndarray) -> StateTensor:
    flat = array.reshape(-1)

    def write(elements: Any) -> None:
        flat[:] = elements

    shards = (LocalShard(0, flat.size, lambda: flat, write),)
    return StateTensor(name, array.shape, array.dtype.name, shards, shards)


def planned(tensors: list[StateTensor]) -> Callable[[Index], LoadPlan]:
    """Plan to read these tensors of any checkpoint."""
    return lambda index: LoadPlan(tensors)


def save(folder: Path) -> Path:
    """Saves `VALUES` and returns the folder of their data."""
    api.save_state(state(VALUES), folder, WorkerGroup(0, 1))
    return next(folder.glob("data-*"))


def restore(folder: Path) -> dict[str, np.ndarray]:
    """The values that a restore has found."""
    found = {name: np.full_like(array, 99) for name, array in VALUES.items()}
    api.restore_state(planned(state(found)), folder, WorkerGroup(0, 1))
    return found


def is_whole(found: dict[str, np.ndarray]) -> bool:
    """Whether these are the values that were saved."""
    return all(np.array_equal(found[name], array) for name, array in VALUES.items())


def forge(
    folder: Path,
    change: Callable[[dict[str, Any]], Any],
    version: int = index_file.FORMAT,
) -> None:
    """Changes what an index says, its checksum, and its format."""
    path = folder / "index.json"
    body = json.loads(path.read_text())
    change(body["content"])
    body["format"] = version
    body["checksum"] = index_file._checksum(body["content"])
    path.write_text(json.dumps(body))
