"""Checkpoints and backups that move between any number of replicas.

A save goes through these files from top to bottom, a restore from `api` to `reader`:

- `api`: `save` and `restore`, on all workers together.
- `on_all_workers`: what succeeds on all workers or fails on all.
- `training_state`: the tensors of a checkpoint and of a backup; what is read of them.
- `model_state`: weights and optimizers as named state tensors.
- `accumulated_gradients`: gradients accumulated for the next update.
- `index`, `index_file`: which file holds which elements; the index as JSON.
- `schema`: types and bounds of what is read from a file.
- `storage`, `object_store`: where the files are.
- `files`: sizes, tensor keys and checksums of the shards' files.
- `writer`, `reader`: shards to the disk, and back into variables.
- `backups`: a directory of backups of one run.
- `replica_state`: variables with a value of their own on each replica.
- `residual_state`: what compressors have kept of gradients.
- `run_schema`: what a backup may say of its run.
- `callback_state`, `random_state`: state of callbacks and of random generators.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.checkpoint.api import restore, save

__all__ = ["restore", "save"]


if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        # The command line reads indexes without TensorFlow, which `api` needs.
        if name in __all__:
            return getattr(importlib.import_module("tfdp.checkpoint.api"), name)
        raise AttributeError(f"module 'tfdp.checkpoint' has no attribute {name!r}")
