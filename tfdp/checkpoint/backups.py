"""Directory of backups: save one, find the newest intact one, delete old ones.

Each backup is a checkpoint in its own subdirectory, `step-<batches so far>`. It is
valid once its index is written.
"""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.checkpoint import files
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint.api import save_state
from tfdp.checkpoint.background import background_saves, memory_budget
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.index_file import INDEX_FILE, UnknownFormat, load_index
from tfdp.checkpoint.object_store import open_storage
from tfdp.checkpoint.on_all_workers import run_on_all_workers, storage_timeout
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.storage import Storage, StoreError
from tfdp.checkpoint.training_state import IncompatibleBackup
from tfdp.checkpoint.writer import remove_checkpoint
from tfdp.communication.coordination.watch import WorkerLost
from tfdp.ground import user_code
from tfdp.ground.base.temporary import temporary_name
from tfdp.ground.text import say
from tfdp.training.sharding.state_tensors import StateTensor

# A backup's directory is named by its step. A damaged backup is renamed to a name with
# the ending `.damaged`, so that a later backup of that step can take its name.
_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_DAMAGED_NAME = re.compile(rf"{_NAME.pattern}\.damaged")
# File with the random identity of the directory of backups, which states in memory have
# in their headers. Without the file, a run does not find the states of earlier runs.
OWNER_FILE = "memory-id"
# Matches the name of the file that a run writes to claim the directory of backups.
_CLAIM = re.compile(r"\.run-[0-9a-f]{12}")
_NOTHING_LOADED = "Nothing was loaded."
# Workers exchange verdicts on a backup, since only a damaged one is replaced by an
# older one: if this run cannot resume from it, or the store fails, all workers raise an
# error.
_INTACT, _DAMAGED, _INCOMPATIBLE, _UNREADABLE = "intact", "damaged", "wrong", "unread"


class Backups:
    """Backups of one run in a directory. All workers call each method together.

    Args:
        directory: String, a path that all workers share, or a URL of an object store.
        keep: Int, number of backups that are kept.
        worker_group: `WorkerGroup` between the workers.
        serialize: Callable that returns the model as a string, or `None`. Defaults to
            one that returns `None`.
        background: Bool, whether backups are written while training continues.
            Defaults to `False`.
        has_memory: Bool, whether this run also keeps states in memory. Defaults to
            `False`: states of earlier runs in memory are dropped.
    """

    def __init__(
        self,
        directory: str,
        keep: int,
        worker_group: Any,
        serialize: Callable[[], str | None] = lambda: None,
        *,
        background: bool = False,
        has_memory: bool = False,
    ) -> None:
        self.directory = directory
        self._keep = keep
        self._worker_group = worker_group
        self._saves = background_saves(worker_group)
        self._serialize = serialize
        self._background = background
        self._has_memory = has_memory
        self._claim = f".run-{uuid.uuid4().hex[:12]}"

    @property
    def source(self) -> str:
        """String, the directory or URL of the backups, for messages."""
        return self.directory

    @functools.cached_property
    def _storage(self) -> Storage:
        """`Storage`, the directory of the backups."""
        return open_storage(self.directory)

    def prepare(self) -> None:
        """Create the directory, check that files can be written and removed, claim it.

        Of several runs with the same directory, the one that starts last has it: the
        others raise an error when they save.

        Raises:
            ValueError: On every worker, if the directory cannot be created, or a
                worker does not see it.
            OSError: On every worker, if the directory cannot be written.
        """
        self.finish()
        run_together = functools.partial(
            run_on_all_workers,
            self._worker_group,
            self.directory,
            "saved",
            "Nothing was trained.",
        )
        probe = run_together("the directory of backups", self._make_directory)
        probe = self._worker_group.all_gather("a backup: its directory", probe)[0]

        def remove() -> None:
            """On worker 0, remove the file `probe`, and files of killed processes.

            Worker 0 has created `probe` so that all workers check that they see it.
            """
            if self._worker_group.is_chief:
                self._storage.remove_file(probe)
                with contextlib.suppress(OSError):  # the next run removes what is left
                    self._storage.remove_left_over()

        def claim() -> None:
            """On worker 0, write this run's claim file, and remove those of other runs.

            A run that finds the claim file of another run raises an error when it
            saves.
            """
            if self._worker_group.is_chief:
                self._storage.write_text(self._claim, "")
                with contextlib.suppress(OSError):  # they may belong to another user
                    for name in self._storage.names():
                        if _CLAIM.fullmatch(name) and name != self._claim:
                            self._storage.remove_file(name)

        try:
            run_together(
                "what workers see of it", lambda: _check_probe(self._storage, probe)
            )
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                remove()
            raise
        run_together("what can be removed from it", remove)
        run_together("the claim of this run", claim)

    def save(self, step: int, state: Sequence[StateTensor], run: Any) -> None:
        """Write a backup, and remove the oldest ones beyond `keep`.

        In the background, this returns once the state is copied.

        Args:
            step: Int, number of batches so far, which names the backup.
            state: Sequence of `StateTensor`.
            run: Metadata of the run, as JSON can hold it.

        Raises:
            ValueError: On every worker, if the backup's path is a link, or another run
                has claimed the directory.
            OSError: On every worker, if one cannot write this backup, or could not
                write the previous one; earlier backups are intact.
        """
        backup = self._storage.below(f"step-{step}")
        if backup.is_link:
            raise ValueError(
                "A backup is not written through a link. Remove the link, or give "
                f"another directory. Received: {backup.path!r}"
            )
        if not self._background:
            # The script may have begun a `save` in the background, which must not run
            # at the same time as this one.
            self._saves.finish()
        save_state(
            state,
            backup.path,
            self._worker_group,
            self._serialize,
            run=run,
            saves=self._saves if self._background else None,
            check=self._check_claim,
            after=functools.partial(self._prune, backup.name),
        )

    def finish(self) -> None:
        """Wait for a save in the background to end, and free the memory of its copy.

        Raises:
            OSError: On every worker, if one could not write the backup.
        """
        self._saves.finish_own()

    def close(self) -> None:
        """Wait for the save in the background to end; print its error, if any.

        The loss of a worker is neither printed nor raised: the next collective of the
        workers raises it.
        """
        try:
            self.finish()
        except WorkerLost:
            # The loss of a worker need not be reported here, since the next exchange
            # between the workers raises it again.
            pass
        except Exception as error:  # noqa: BLE001 must not hide an error of the caller
            say(error)

    def release(self) -> None:
        """Remove this run's claim file, by which other runs find that it saves here.

        Only worker 0 removes it. A later `save` writes it again, or raises an error if
        another run has claimed the directory.
        """
        if self._worker_group.is_chief:
            with contextlib.suppress(OSError):
                self._storage.remove_file(self._claim)

    def list_steps(self) -> list[int]:
        """Return the steps of the backups that have an index, the newest first.

        If this run keeps no states in memory, those of earlier runs are dropped.

        Raises:
            OSError: On every worker, if worker 0 cannot read the directory.
        """
        group = self._worker_group

        def find() -> list[int]:
            """On worker 0, list the steps of backups with an index, the newest first.

            Other workers return an empty list. If this run keeps no states in memory,
            `OWNER_FILE`, by which a run finds those of earlier runs, is removed.
            """
            if not group.is_chief:
                return []
            names = self._storage.names()
            if OWNER_FILE in names and not self._has_memory:
                self._storage.remove_file(OWNER_FILE)
            return _steps_of(self._storage, names)

        found_steps = run_on_all_workers(
            group, self.directory, "restored", _NOTHING_LOADED, "the backups", find
        )
        return group.all_gather("their steps", found_steps)[0]

    def find_newest(
        self, make_plan: Callable[[Index], LoadPlan], steps: Sequence[int]
    ) -> tuple[Index, LoadPlan] | None:
        """Find the newest intact backup, the same one on all workers.

        Damaged backups that are newer are renamed, with a warning.

        Args:
            make_plan: Callable that takes the `Index` of a backup and returns its
                `LoadPlan`, or raises `IncompatibleBackup`.
            steps: Sequence of ints, the result of `list_steps`.

        Returns:
            Tuple of the backup's `Index` and `LoadPlan`; or `None` if there is no
            backup.

        Raises:
            ValueError: On every worker, if the run cannot resume from the newest intact
                backup, or if all backups are damaged.
            OSError: On every worker, if one of them cannot read a backup.
        """
        damaged: list[tuple[str, str]] = []
        for step in steps:
            name = f"step-{step}"
            found, fault = self._inspect(name, make_plan)
            if found is not None:
                self._rename_damaged(damaged, name)
                return found
            damaged.append((name, fault))
        if damaged:
            raise ValueError(
                f"All backups in {self.directory!r} are damaged. To train from the "
                "start, delete this directory or give another one. "
                f"Received: {_describe(damaged)}"
            )
        return None

    def load(self, index: Index, load_plan: LoadPlan) -> None:
        """Assign what `find_newest` has read to the variables of this worker.

        Args:
            index: `Index` of the backup.
            load_plan: `LoadPlan`, as `find_newest` returned it.

        Raises:
            ValueError: On every worker, if a file is wrong on one of them.
            OSError: On every worker, if one of them cannot read a file.
        """
        backup = self._storage.below(f"step-{index.run['steps']}")
        read = functools.partial(reading.assign_values, load_plan)
        outcome = "Some variables may have been overwritten; restart the script."
        run_on_all_workers(
            self._worker_group, backup.path, "restored", outcome, "its tensors", read
        )
        load_plan.finish()

    def delete(self) -> None:
        """Remove all backups, and the directory if it is empty then.

        Nothing is removed if another run has claimed the directory. Files that were not
        written by a backup stay, even under a backup's name.
        """
        self._worker_group.all_gather("the end of the backups")
        if not self._worker_group.is_chief:
            return
        with contextlib.suppress(OSError):
            if self._has_other_claim():
                return
            # The oldest backup is removed first, so that the newest one is still there
            # if the loop is interrupted.
            for step in reversed(_steps_of(self._storage, self._storage.names())):
                remove_checkpoint(self._storage.below(f"step-{step}"))
            for name in self._storage.names():
                if name in (OWNER_FILE, self._claim):
                    self._storage.remove_file(name)
                if _NAME.fullmatch(name) or _DAMAGED_NAME.fullmatch(name):
                    remove_checkpoint(self._storage.below(name))
            self._storage.remove_left_over()
            self._storage.remove_if_empty()

    def _has_other_claim(self) -> bool:
        """Return whether another run has claimed the directory since `prepare`."""
        return any(map(_CLAIM.fullmatch, {*self._storage.names()} - {self._claim}))

    def _check_claim(self) -> None:
        """Raise `ValueError` if another run has claimed the directory.

        If the claim of this run was removed meanwhile, write it again.
        """
        if self._has_other_claim():
            raise ValueError(
                "another run has begun to write backups into this directory. Give each "
                "run a directory of its own"
            )
        if not self._storage.has(self._claim):
            self._storage.make()
            self._storage.write_text(self._claim, "")

    def _make_directory(self) -> str:
        """Create the directory and a probe file in it on worker 0.

        Returns:
            String, name of the probe file; `""` on other workers.

        Raises:
            OSError: If a file cannot be written.
            ValueError: If a file has the directory's path, or this worker lacks the
                package of the object store.
        """
        # Every worker opens the storage, so that a worker that lacks the object store's
        # package raises its error now and not at the first backup.
        storage = self._storage
        if not self._worker_group.is_chief:
            return ""
        storage.make()
        probe = f".{temporary_name('probe')}"
        storage.write_text(probe, "")
        return probe

    def _inspect(
        self, name: str, make_plan: Callable[[Index], LoadPlan]
    ) -> tuple[tuple[Index, LoadPlan] | None, str]:
        """Read the index and this worker's shards of a backup; describe any damage.

        All workers call this together.

        Args:
            name: String, name of the backup, such as `"step-12"`.
            make_plan: Callable, as in `find_newest`.

        Returns:
            Tuple of the pair of `Index` and `LoadPlan`, or `None` for a damaged backup;
            and a string, the damage, which is `""` for an intact backup.

        Raises:
            ValueError: On every worker, if the backup is incompatible with the run.
            OSError: On every worker, if one of them cannot read it.
        """
        backup, room = self._storage.below(name), memory_budget(self._worker_group)

        def find() -> tuple[Index, LoadPlan]:
            """Return the index, and a load plan with the values for this worker."""
            index = load_index(backup.path)
            folder = backup.below(index.token)
            # The sizes that the index lists are compared with those of the files first,
            # since `make_plan` allocates arrays by the index, which may be damaged.
            files.check_sizes(index.shards, folder)
            load_plan = make_plan(index)
            if name != f"step-{index.run['steps']}":
                raise ValueError(f"its index is that of step {index.run['steps']}")
            reading.read_shards(load_plan, index, folder, room)
            return index, load_plan

        return agree_on_backup(self._worker_group, backup.path, find)

    def _rename_damaged(self, damaged: list[tuple[str, str]], used: str) -> None:
        """Rename damaged backups, so that later ones can take their names.

        Args:
            damaged: List of pairs of a backup's name and its fault.
            used: String, name of the backup that is restored instead.
        """
        if not damaged:
            return
        outcome = f"They are renamed to '{damaged[0][0]}.damaged'."
        if self._worker_group.is_chief:
            for name, _ in damaged:
                try:
                    self._storage.rename(name, f"{name}.damaged")
                except OSError as error:
                    outcome = f"Not all can be renamed ({files.error_text(error)})."
        # The workers wait for worker 0 as long as for storage operations, since an
        # object store renames by copying, which takes long.
        outcome = self._worker_group.all_gather(
            "what is damaged", outcome, storage_timeout(self._worker_group)
        )[0]
        user_code.warn(
            f"Training resumes from the backup {used!r}, since newer backups are "
            f"damaged. {outcome} Received: {_describe(damaged)}"
        )

    def _prune(self, newest: str) -> None:
        """Remove all backups but the latest `keep` ones and the one named `newest`."""
        with contextlib.suppress(OSError):  # the next save removes what is left
            names = self._storage.names()
            steps = _steps_of(self._storage, names)[: self._keep]
            kept = [f"step-{step}" for step in steps]
            for name in names:
                if _NAME.fullmatch(name) and name not in (newest, *kept):
                    remove_checkpoint(self._storage.below(name))


def agree_on_backup(
    worker_group: Any, path: str, find: Callable[[], tuple[Index, LoadPlan]]
) -> tuple[tuple[Index, LoadPlan] | None, str]:
    """Make workers agree that a backup is intact on each of them, or on its damage.

    All workers call this together.

    Args:
        worker_group: `WorkerGroup` between the workers.
        path: String, which names the backup in messages.
        find: Callable that returns the `Index` and `LoadPlan` on this worker, or raises
            an error.

    Returns:
        Tuple of the result of `find` on this worker, or `None` for a damaged backup;
        and a string, the damage, which is `""` for an intact backup.

    Raises:
        ValueError: On every worker, if the backup is incompatible with the run.
        OSError: On every worker, if one of them cannot read it.
    """
    found, kind, text = None, _INTACT, ""
    try:
        index, load_plan = found = find()
        text = f"{index.token} {load_plan.label}"
    except (IncompatibleBackup, UnknownFormat) as error:
        kind, text = _INCOMPATIBLE, str(error)
    except StoreError as error:
        kind, text = _UNREADABLE, str(error)
    except Exception as error:  # noqa: BLE001 the other workers wait for a verdict
        kind, text = _DAMAGED, files.error_text(error)
    verdicts = worker_group.all_gather(
        "a backup", [kind, text], storage_timeout(worker_group)
    )
    _raise_if_unusable(path, verdicts)
    is_same_everywhere = all(verdict == verdicts[0] for verdict in verdicts)
    faults = [
        text if is_same_everywhere else f"worker {rank}: {text}"
        for rank, (kind, text) in enumerate(verdicts)
        if kind == _DAMAGED
    ]
    if not faults and not is_same_everywhere:
        faults = ["workers find different files in it"]
    return (None, faults[0]) if faults else (found, "")


def _raise_if_unusable(path: str, verdicts: list) -> None:
    """Raise for an incompatible or unreadable backup, since older ones would not help.

    Args:
        path: String, path or URL of the backup.
        verdicts: List of pairs by worker: `_INTACT`, `_DAMAGED`, `_INCOMPATIBLE` or
            `_UNREADABLE`, and a text on the reason.

    Raises:
        ValueError: If the backup is incompatible on a worker.
        OSError: If a worker could not read it, as its store failed.
    """
    for rank, (kind, text) in enumerate(verdicts):
        text = text.rstrip(".")
        if kind == _INCOMPATIBLE:
            raise ValueError(
                f"Training cannot resume from this backup: {text}. "
                f"{_NOTHING_LOADED} Run the script that wrote it, or give another "
                f"directory. Received: {path!r}"
            )
        if kind == _UNREADABLE:
            # The storage failed, not the backup, which may be intact. So training does
            # not fall back to an older one.
            raise OSError(
                f"The backup was not read: worker {rank}: {text}. "
                f"{_NOTHING_LOADED} Received: {path!r}"
            )


def _check_probe(storage: Storage, name: str) -> None:
    """Raise `ValueError` unless this worker sees the file that worker 0 has created.

    Workers check it before training: one that does not see the file has another
    directory for its backups.

    Args:
        storage: `Storage`, the directory of backups as this worker opens it.
        name: String, name of worker 0's file in it.
    """
    if not storage.has(name):
        raise ValueError(
            "the file that worker 0 wrote is not visible here; give a directory that "
            "all workers share, and no other job uses"
        )


def _steps_of(storage: Storage, names: Sequence[str]) -> list[int]:
    """Return the steps of the backups with an index among some names, newest first.

    Args:
        storage: `Storage`, the directory.
        names: Sequence of strings, the names of files and folders in the directory.
    """
    found = []
    for name in names:
        match, backup = _NAME.fullmatch(name), storage.below(name)
        if match and not backup.is_link and backup.has(INDEX_FILE):
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def _describe(damaged: list[tuple[str, str]]) -> str:
    """Format the names and faults of damaged backups as one line.

    Returns:
        String such as `"step-8: it was altered; step-6: it is truncated"`.
    """
    return "; ".join(f"{name}: {fault}" for name, fault in damaged)
