"""A directory of backups: one is added, the newest that is whole is found.

Each is a checkpoint in a directory of its own, `step-<batches so far>`, and counts
once its index is in place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tfdp.checkpoint import files
from tfdp.checkpoint import reader as reading
from tfdp.checkpoint.api import save_state, together
from tfdp.checkpoint.index import Index
from tfdp.checkpoint.index_file import INDEX_FILE, UnknownFormat, load_index
from tfdp.checkpoint.run_state import Wanted
from tfdp.checkpoint.writer import write_text
from tfdp.sharding.state_tensors import StateTensor

_NAME = re.compile(r"step-(\d+)")
_PROBE = ".tfdp-probe"
_ASIDE = re.compile(r"step-\d+\.damaged")
# Only the user who trains has a use for what is in it.
_MODE = 0o700
_INTACT, _DAMAGED, _WRONG = "intact", "damaged", "wrong"


class WrongBackup(ValueError):
    """A backup that is whole, but not one to go on from."""


class Backups:
    """The backups of one run. All workers make the same calls.

    Args:
        directory: String, which all workers share.
        keep: Int, how many are kept.
        worker_group: `WorkerGroup` between the workers.
    """

    def __init__(self, directory: str, keep: int, worker_group: Any) -> None:
        self.directory = directory
        self._keep = keep
        self._worker_group = worker_group
        self._rank = worker_group.rank

    def prepare(self) -> None:
        """Makes the directory, and sees whether backups can be written.

        Raises:
            ValueError: On every worker, if there can be no such directory, or a
                worker does not see it.
            OSError: On every worker, if it cannot be written.
        """
        act = functools.partial(
            together,
            self._worker_group,
            self.directory,
            "saved",
            "Nothing was trained.",
        )
        probe = act("the directory of backups", self._make)
        probe = self._worker_group.all_gather("a backup: its directory", probe)[0]
        try:
            act("what workers see of it", functools.partial(self._look_for, probe))
        finally:
            if self._rank == 0:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.directory, _PROBE))

    def save(
        self,
        step: int,
        state: Sequence[StateTensor],
        run: Any,
        serialize: Callable[[], str | None],
    ) -> None:
        """Adds a backup, and removes those that are not kept.

        Args:
            step: Int, batches so far.
            state: Sequence of `StateTensor`.
            run: What else there is, as JSON can hold it.
            serialize: Callable that returns the model as a string.

        Raises:
            OSError: On every worker, if one cannot write; those before are intact.
        """
        path = os.path.join(self.directory, f"step-{step}")
        save_state(state, path, self._worker_group, serialize, run=run)
        if self._rank == 0:
            self._prune(os.path.basename(path))

    def choose(self, plan: Callable[[Index], Wanted]) -> tuple[Index, Wanted] | None:
        """Finds the newest backup that is whole, on all workers the same one.

        Args:
            plan: Callable that takes the `Index` of a backup and returns what is
                read of it, or raises `WrongBackup`.

        Returns:
            Tuple of its `Index` and what `plan` returned, or `None` if there is none.

        Raises:
            ValueError: On every worker, if it is not one to go on from, or if there
                are some and none is whole.
        """
        own = json.dumps(_numbers(self.directory) if self._rank == 0 else [])
        steps = json.loads(self._worker_group.all_gather("the backups", own)[0])
        damaged: list[tuple[str, str]] = []
        for step in steps:
            name = f"step-{step}"
            found, fault = self._look_at(name, plan)
            if found is not None:
                self._set_aside(damaged, name)
                return found
            damaged.append((name, fault))
        if damaged:
            self._worker_group.leave()
            raise ValueError(
                f"No backup in {self.directory!r} is whole. To train from the start, "
                f"give another directory or delete it. Received: {_listed(damaged)}"
            )
        return None

    def load(self, index: Index, step: int, wanted: Wanted) -> None:
        """Reads a backup into the variables of this worker.

        Raises:
            ValueError: On every worker, if one of them cannot.
            OSError: The same.
        """
        path = os.path.join(self.directory, f"step-{step}")

        def read() -> None:
            wanted.state.forget()
            reading.read_parts(wanted.tensors, index, os.path.join(path, index.token))

        aftermath = "The model may hold some of it; start the script again."
        together(self._worker_group, path, "restored", aftermath, "its tensors", read)

    def delete(self) -> None:
        """Removes all backups, and the directory if nothing else is in it."""
        self._worker_group.all_gather("the end of the backups")
        if self._rank:
            return
        with contextlib.suppress(OSError):
            for step in reversed(_numbers(self.directory)):  # the newest goes last
                _remove(os.path.join(self.directory, f"step-{step}"))
            for name in os.listdir(self.directory):
                if _NAME.fullmatch(name) or _ASIDE.fullmatch(name):
                    _remove(os.path.join(self.directory, name))
            os.rmdir(self.directory)

    def _make(self) -> str:
        if self._rank:
            return ""
        if os.path.exists(self.directory) and not os.path.isdir(self.directory):
            raise ValueError("there is a file of that name; give a directory")
        os.makedirs(self.directory, _MODE, exist_ok=True)
        probe = uuid.uuid4().hex
        write_text(os.path.join(self.directory, _PROBE), probe)
        return probe

    def _look_for(self, probe: str) -> None:
        found = ""
        path = os.path.join(self.directory, _PROBE)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            found = file.read().decode(errors="replace")
        if found != probe:
            raise ValueError(
                "it does not see what worker 0 has written there; give a directory "
                "that all workers share"
            )

    def _look_at(
        self, name: str, plan: Callable[[Index], Wanted]
    ) -> tuple[tuple[Index, Wanted] | None, str]:
        """What this worker reads of a backup, or why nobody can."""
        path = os.path.join(self.directory, name)
        found, kind, text = None, _INTACT, ""
        try:
            index = load_index(path)
            wanted = plan(index)
            parts = reading.needed_parts(wanted.tensors, index)
            files.verify(parts, os.path.join(path, index.token))
            found, text = (index, wanted), f"{index.token} {wanted.label}"
        except (WrongBackup, UnknownFormat) as error:
            kind, text = _WRONG, str(error)
        except Exception as error:  # noqa: BLE001 whatever it is, all must hear of it
            kind, text = _DAMAGED, files.cause_of(error)
        told = self._worker_group.all_gather("a backup", json.dumps([kind, text]))
        verdicts = [json.loads(item) for item in told]
        self._raise_if_wrong(path, verdicts)
        faults = [
            text if len(set(told)) == 1 else f"worker {rank}: {text}"
            for rank, (kind, text) in enumerate(verdicts)
            if kind == _DAMAGED
        ]
        if not faults and len(set(told)) > 1:
            faults = ["workers find different files in it"]
        return (None, faults[0]) if faults else (found, "")

    def _raise_if_wrong(self, path: str, verdicts: list) -> None:
        wrong = [text for kind, text in verdicts if kind == _WRONG]
        if wrong:
            self._worker_group.leave()
            raise ValueError(
                f"Training cannot go on from this backup: {wrong[0].rstrip('.')}. "
                "Nothing was loaded. Run what made it, or give another directory. "
                f"Received: {path!r}"
            )

    def _set_aside(self, damaged: list[tuple[str, str]], used: str) -> None:
        """Keeps what is damaged out of the way of what comes after."""
        if not damaged:
            return
        if self._rank == 0:
            for name, _ in damaged:
                path = os.path.join(self.directory, name)
                with contextlib.suppress(OSError):
                    os.rename(path, f"{path}.damaged")
        warnings.warn(
            f"Training goes on from the backup {used!r}, since newer ones are damaged. "
            f"They stay as '{damaged[0][0]}.damaged'. Received: {_listed(damaged)}",
            stacklevel=2,
        )

    def _prune(self, newest: str) -> None:
        """Removes old backups, and what saves have left that did not end."""
        with contextlib.suppress(OSError):  # the next save tries again
            names = [name for name in os.listdir(self.directory) if _NAME.match(name)]
            kept = [f"step-{step}" for step in _numbers(self.directory)[: self._keep]]
            for name in names:
                if _NAME.fullmatch(name) and name not in (newest, *kept):
                    _remove(os.path.join(self.directory, name))


def _numbers(directory: str) -> list[int]:
    """The steps of the backups that have an index, the newest first."""
    found = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
    for name in names:
        match = _NAME.fullmatch(name)
        if match and os.path.exists(os.path.join(directory, name, INDEX_FILE)):
            found.append(int(match[1]))
    return sorted(found, reverse=True)


def _remove(path: str) -> None:
    """Removes a backup; without its index, what is left of it counts no more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, INDEX_FILE))
    shutil.rmtree(path, ignore_errors=True)


def _listed(damaged: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {fault}" for name, fault in damaged)
