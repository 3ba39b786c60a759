"""Trains on the two workers of a Ray cluster, and keeps the model that is reported.

python tests/ray/two_nodes.py ADDRESS FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig

from tests.ray import loops
from tfdp.ray import KerasTrainer


def main(address: str, folder: Path) -> None:
    """Train, and copy `model.keras` into the folder."""
    ray.init(address=address)
    result = KerasTrainer(
        loops.train,
        train_loop_config={"notes": str(folder / "notes"), "notes_place": True},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=str(folder / "storage")),
    ).fit()
    with result.checkpoint.as_directory() as reported:
        shutil.copy(Path(reported) / "model.keras", folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
