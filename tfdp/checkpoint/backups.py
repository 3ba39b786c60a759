"""Directory of backups: save one, find the newest that is intact, delete old ones.

Each is a checkpoint in a directory of its own, `step-<batches so far>`, and counts
once its index is in place.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.checkpoint import files
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint.api import save_state
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.index_file import INDEX_FILE, UnknownFormat, load_index
from tfdp.checkpoint.object_store import open_storage
from tfdp.checkpoint.on_all_workers import run_on_all_workers, storage_timeout
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.checkpoint.writer import remove_checkpoint
from tfdp.ground import user_code
from tfdp.ground.base.temporary import temporary_name
from tfdp.training.sharding.state_tensors import StateTensor

_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_ASIDE = re.compile(rf"{_NAME.pattern}\.damaged")
_NOTHING_LOADED = "Nothing was loaded."
_INTACT, _DAMAGED, _INCOMPATIBLE, _UNREADABLE = "intact", "damaged", "wrong", "unread"


class IncompatibleBackup(ValueError):
    """Intact backup that the run cannot resume from."""


class Backups:
    """Backups of one run. All workers make the same calls.

    Args:
        directory: String, which all workers share, or a URL of an object store.
        keep: Int, how many are kept.
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, directory: str, keep: int, worker_group: Any) -> None:
        self.directory = directory
        self._keep = keep
        self._worker_group = worker_group

    @functools.cached_property
    def _storage(self) -> Storage:
        return open_storage(self.directory)

    def prepare(self) -> None:
        """Make the directory, and check that files can be written there and removed.

        Raises:
            ValueError: On every worker, if there can be no such directory, or a
                worker does not see it.
            OSError: On every worker, if it cannot be written.
        """
        act = functools.partial(
            run_on_all_workers,
            self._worker_group,
            self.directory,
            "saved",
            "Nothing was trained.",
        )
        probe = act("the directory of backups", self._make_directory)
        probe = self._worker_group.all_gather("a backup: its directory", probe)[0]

        def remove() -> None:
            if self._worker_group.is_chief:
                self._storage.remove_file(probe)
                with contextlib.suppress(OSError):  # the next start tries again
                    self._storage.remove_left_over()

        try:
            act("what workers see of it", lambda: _check_probe(self._storage, probe))
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                remove()
            raise
        act("what can be removed from it", remove)

    def save(
        self,
        step: int,
        state: Sequence[StateTensor],
        run: Any,
        serialize: Callable[[], str | None],
    ) -> None:
        """Add a backup, and remove those that are not kept.

        Args:
            step: Int, batches so far.
            state: Sequence of `StateTensor`.
            run: What else there is, as JSON can hold it.
            serialize: Callable that returns the model as a string.

        Raises:
            OSError: On every worker, if one cannot write; those before are intact.
        """
        backup = self._storage.below(f"step-{step}")
        if backup.is_link:
            raise ValueError(
                "A backup is not written through a link. Remove it, or give another "
                f"directory. Received: {backup.path!r}"
            )
        save_state(state, backup.path, self._worker_group, serialize, run=run)
        if self._worker_group.is_chief:
            self._prune(backup.name)

    def find_newest(
        self, make_plan: Callable[[Index], LoadPlan]
    ) -> tuple[Index, LoadPlan] | None:
        """Find the newest intact backup, the same one on all workers.

        Args:
            make_plan: Callable that takes the `Index` of a backup and returns what is
                read of it, or raises `IncompatibleBackup`.

        Returns:
            Tuple of its `Index` and the load plan, or `None` if there is none.

        Raises:
            ValueError: On every worker, if it is not one to go on from, or if there
                are some and none is whole.
            OSError: On every worker, if one of them cannot read what there is.
        """
        group = self._worker_group

        def find() -> list[int]:
            return _steps_of(self._storage) if self._worker_group.is_chief else []

        found_steps = run_on_all_workers(
            group, self.directory, "restored", _NOTHING_LOADED, "the backups", find
        )
        steps = group.all_gather("their steps", found_steps)[0]
        damaged: list[tuple[str, str]] = []
        for step in steps:
            name = f"step-{step}"
            found, fault = self._inspect(name, make_plan)
            if found is not None:
                self._set_aside(damaged, name)
                return found
            damaged.append((name, fault))
        if damaged:
            self._worker_group.leave()
            raise ValueError(
                f"No backup in {self.directory!r} is whole. To train from the start, "
                f"give another directory or delete it. Received: {_describe(damaged)}"
            )
        return None

    def load(self, index: Index, step: int, load_plan: LoadPlan) -> None:
        """Read a backup into the variables of this worker.

        Raises:
            ValueError: On every worker, if one of them cannot.
            OSError: The same.
        """
        backup = self._storage.below(f"step-{step}")
        folder = backup.below(index.token)
        read = functools.partial(reading.read_shards, load_plan, index, folder)
        aftermath = "The model may hold some of it; start the script again."
        run_on_all_workers(
            self._worker_group, backup.path, "restored", aftermath, "its tensors", read
        )
        load_plan.finish()

    def delete(self) -> None:
        """Remove all backups, and the directory if nothing else is in it.

        What no backup has written stays, whatever its name is.
        """
        self._worker_group.all_gather("the end of the backups")
        if not self._worker_group.is_chief:
            return
        with contextlib.suppress(OSError):
            for step in reversed(_steps_of(self._storage)):  # the newest goes last
                remove_checkpoint(self._storage.below(f"step-{step}"))
            for name in self._storage.names():
                if _NAME.fullmatch(name) or _ASIDE.fullmatch(name):
                    remove_checkpoint(self._storage.below(name))
            self._storage.remove_left_over()
            self._storage.remove_if_empty()

    def _make_directory(self) -> str:
        storage = self._storage  # on every worker: one may lack what it needs
        if not self._worker_group.is_chief:
            return ""
        storage.make()
        probe = f".{temporary_name('probe')}"
        storage.write_text(probe, "")
        return probe

    def _inspect(
        self, name: str, make_plan: Callable[[Index], LoadPlan]
    ) -> tuple[tuple[Index, LoadPlan] | None, str]:
        """Index and load plan of a backup, or why no worker can use it."""
        backup = self._storage.below(name)
        found, kind, text = None, _INTACT, ""
        try:
            index = load_index(backup.path)
            folder = backup.below(index.token)
            # Before anything is made that is as large as the index says.
            files.verify_files(index.shards, folder, contents=False)
            load_plan = make_plan(index)
            if name != f"step-{index.run['steps']}":
                raise ValueError(f"it says that it is of step {index.run['steps']}")
            shards = reading.needed_shards(load_plan.tensors, index)
            files.verify_files(shards, folder)
            found, text = (index, load_plan), f"{index.token} {load_plan.label}"
        except (IncompatibleBackup, UnknownFormat) as error:
            kind, text = _INCOMPATIBLE, str(error)
        except StoreError as error:
            kind, text = _UNREADABLE, str(error)
        except Exception as error:  # noqa: BLE001 whatever it is, all must hear of it
            kind, text = _DAMAGED, files.error_text(error)
        verdicts = self._worker_group.all_gather(
            "a backup", [kind, text], storage_timeout(self._worker_group)
        )
        self._raise_if_unusable(backup.path, verdicts)
        are_alike = all(verdict == verdicts[0] for verdict in verdicts)
        faults = [
            text if are_alike else f"worker {rank}: {text}"
            for rank, (kind, text) in enumerate(verdicts)
            if kind == _DAMAGED
        ]
        if not faults and not are_alike:
            faults = ["workers find different files in it"]
        return (None, faults[0]) if faults else (found, "")

    def _raise_if_unusable(self, path: str, verdicts: list) -> None:
        """Raise what no older backup would help against."""
        for rank, (kind, text) in enumerate(verdicts):
            text = text.rstrip(".")
            if kind == _INCOMPATIBLE:
                self._worker_group.leave()
                raise ValueError(
                    f"Training cannot go on from this backup: {text}. "
                    f"{_NOTHING_LOADED} Run what made it, or give another directory. "
                    f"Received: {path!r}"
                )
            if kind == _UNREADABLE:  # which is no fault of the backup
                self._worker_group.leave()
                raise OSError(
                    f"The backup was not read: worker {rank}: {text}. "
                    f"{_NOTHING_LOADED} Received: {path!r}"
                )

    def _set_aside(self, damaged: list[tuple[str, str]], used: str) -> None:
        """Rename damaged backups, so that later ones can take their names."""
        if not damaged:
            return
        if self._worker_group.is_chief:
            for name, _ in damaged:
                with contextlib.suppress(OSError):
                    self._storage.rename(name, f"{name}.damaged")
        # An object store copies them.
        self._worker_group.all_gather(
            "what is damaged", "", storage_timeout(self._worker_group)
        )
        user_code.warn(
            f"Training goes on from the backup {used!r}, since newer ones are damaged. "
            f"They stay as '{damaged[0][0]}.damaged'. Received: {_describe(damaged)}"
        )

    def _prune(self, newest: str) -> None:
        """Remove old backups, and what interrupted saves have left."""
        with contextlib.suppress(OSError):  # the next save tries again
            names = self._storage.names()
            kept = [f"step-{step}" for step in _steps_of(self._storage)[: self._keep]]
            for name in names:
                if _NAME.fullmatch(name) and name not in (newest, *kept):
                    remove_checkpoint(self._storage.below(name))


def _check_probe(storage: Storage, name: str) -> None:
    if not storage.has(name):
        raise ValueError(
            "it does not see what worker 0 has written there; give a directory that "
            "all workers share"
        )


def _steps_of(storage: Storage) -> list[int]:
    """Steps of the backups that have an index, the newest first."""
    found = []
    for name in storage.names():
        match, backup = _NAME.fullmatch(name), storage.below(name)
        if match and not backup.is_link and backup.has(INDEX_FILE):
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def _describe(damaged: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {fault}" for name, fault in damaged)
