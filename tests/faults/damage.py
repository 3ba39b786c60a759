"""What happens to the files of a backup between two lives of a job."""

from __future__ import annotations

import os
from pathlib import Path

WAYS = ("flip", "truncate", "missing", "index", "flipped index")


def backups(state: Path) -> list[Path]:
    """The folders of the backups that have an index, the oldest first."""
    found = [path.parent for path in state.glob("backup/step-*/index.json")]
    return sorted(found, key=step_of)


def step_of(backup: Path) -> int:
    """After how many steps a backup was taken."""
    return int(backup.name.removeprefix("step-"))


def damage(backup: Path, way: str) -> None:
    """Damages one file of a backup.

    Args:
        backup: Path of its folder.
        way: String of `WAYS`.
    """
    index = backup / "index.json"
    data = sorted(backup.glob("data-*/*.data"))[-1]
    if way == "missing":
        data.unlink()
    elif way in ("truncate", "index"):
        path = data if way == "truncate" else index
        os.truncate(path, path.stat().st_size // 2)
    else:
        path = data if way == "flip" else index
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
