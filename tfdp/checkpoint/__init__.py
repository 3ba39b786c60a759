"""Checkpoints and backups, which restore on any number of replicas.

A save goes through these files from top to bottom, a restore from `api` to `reader`:

- `api`: `save` and `restore`, called on all workers together.
- `background`: saves that are written while training continues.
- `copies`: copies of the state in memory, which such saves write.
- `on_all_workers`: actions that succeed on all workers or fail on all.
- `training_state`: tensors of checkpoints and backups; load plans for both.
- `model_state`: weights and optimizers as named state tensors.
- `accumulated_gradients`: gradients accumulated for the next update.
- `index`, `index_file`: the index, which maps elements to files; its JSON file.
- `schema`: checks of the types and bounds of values read from a file.
- `storage`, `object_store`: folders of files on a disk or in an object store.
- `files`: sizes and checksums of shard files.
- `writer`, `reader`: shards written to storage, and read into variables.
- `backups`: the directory with the backups of one run.
- `memory_backups`: the newest states of a run in the memory of hosts.
- `memory_parts`, `host_memory`: headers and places of their parts; files of one host.
- `memory_reader`: parts read here, and pieces of them from other hosts.
- `newest_state`: the memory and the directory of a run, and the newest state in them.
- `replica_state`: tensors of variables whose values differ between replicas.
- `residual_state`: tensors of the state of compressors.
- `run_schema`: the schema of the run metadata in a backup.
- `callback_state`, `random_state`: states of callbacks and of random generators.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.checkpoint.api import restore, save
    from tfdp.checkpoint.background import PendingSave

__all__ = ["PendingSave", "restore", "save"]


# Type checkers must not see `__getattr__`: with it, they accept any attribute of this
# package, even a misspelled one.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import `PendingSave`, `restore` or `save` at its first use."""
        # `api` is imported at the first use of a name, since it imports TensorFlow,
        # which is slow and which commands that only read indexes do not need.
        if name in __all__:
            return getattr(importlib.import_module("tfdp.checkpoint.api"), name)
        raise AttributeError(f"module 'tfdp.checkpoint' has no attribute {name!r}")
