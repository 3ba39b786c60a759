"""What a worker's fault does to it, at the moment when it is to happen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.faults.plan import Fault, JobPlan, Setting
from tests.harness.timing import wait_until

BUSY_SECONDS = 30.0
# Longer than the others may take to hear of a death.
CHILD_SECONDS = 15.0
FILLER = "filler"
SIGNALS = {
    **dict.fromkeys(("kill", "crash", "damage"), signal.SIGKILL),
    "stop": signal.SIGSTOP,
    "sigterm": signal.SIGTERM,
}
_PAGE_BYTES = 4096


class Trigger:
    """Lets the fault of a plan happen on its worker.

    Args:
        plan: `JobPlan`.
        rank: Int.
        setting: `Setting`.
        note: Callable, called with an event before the fault happens.
    """

    def __init__(self, plan: JobPlan, rank: int, setting: Setting, note) -> None:
        self._plan = plan
        self._rank = rank
        self._setting = setting
        self._note = note
        self._counts: dict[tuple[str, str], int] = {}

    def reach(self, phase: str, point: str = "") -> None:
        """Called where something may happen; counts."""
        count = self._counts[phase, point] = self._counts.get((phase, point), 0) + 1
        fault = self._plan.fault
        if fault is None or fault.place != (phase, point) or fault.step != count:
            return
        if fault.hits_all or fault.rank == self._rank:
            self._meet(fault)
        elif self._rank == self._plan.busy_rank:
            time.sleep(BUSY_SECONDS)

    def count(self, phase: str) -> int:
        """How often it has been called for a phase."""
        return self._counts.get((phase, ""), 0)

    def _meet(self, fault: Fault) -> None:
        def happen() -> None:
            self._note("fault", fault.kind)
            _let_happen(fault, self._setting)

        if fault.phase != "any":
            happen()
            return
        timer = threading.Timer(fault.after, happen)
        timer.daemon = True
        timer.start()


def _let_happen(fault: Fault, setting: Setting) -> None:
    if fault.leaves_child:
        _leave_child()
    if fault.kind == "damage":
        _await_backup(fault.step, setting)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
    if fault.kind == "pause":
        _pause(fault.seconds)
        return
    if fault.kind == "raise":
        raise ArithmeticError("the script's own error")
    if fault.kind == "exit":
        sys.exit(7)
    if fault.kind == "full":
        _fill(Path(setting.state, FILLER), fault.num_pages)
    if fault.kind == "cut":
        for command in setting.cut_commands:
            subprocess.run(command, check=True)
    time.sleep(fault.seconds)


def _await_backup(step: int, setting: Setting) -> None:
    """Waits until what was saved before a step is complete: the next life needs it."""
    from tests.faults.worker import SAVE_FREQ

    last = (step - 1) // SAVE_FREQ * SAVE_FREQ
    index = Path(setting.state, "backup", f"step-{last}", "index.json")
    wait_until(index.exists, str(index))


def _leave_child() -> None:
    """Forks a process with all that is open here, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(CHILD_SECONDS)
        os._exit(0)


def _pause(seconds: float) -> None:
    """Stands still until another process lets this one go on."""
    wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def _fill(path: Path, num_pages: int) -> None:
    """Takes all the room of a small disk but a few pages."""
    zeros = bytes(_PAGE_BYTES)
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(zeros) == _PAGE_BYTES:
            pass
    size = path.stat().st_size
    os.truncate(path, max(0, size - size % _PAGE_BYTES - num_pages * _PAGE_BYTES))


class Saves:
    """Lets faults happen within a save, and notes what was reported saved.

    Args:
        trigger: `Trigger`.
        note: Callable, called with an event and a text.
        state: String, the folder in which checkpoints are.
    """

    def __init__(self, trigger: Trigger, note, state: str) -> None:
        self._trigger = trigger
        self._note = note
        self._checkpoint = f"{state}/checkpoint"

    def save(self, model) -> None:
        """Saves a checkpoint, and notes which one it is."""
        import tfdp
        from tfdp.checkpoint.index_file import load_index

        tfdp.checkpoint.save(model, self._checkpoint)
        self._note("saved", load_index(self._checkpoint).token)

    def install(self) -> None:
        """Changes tfdp's functions in this process, which has this job only."""
        from tfdp.checkpoint import storage
        from tfdp.checkpoint import writer as writing
        from tfdp.checkpoint.backups import Backups

        write_local_shards = writing.write_local_shards
        write_text = storage.write_text
        replace_index = writing.replace_index
        prune, delete = Backups._prune, Backups.delete

        def noted_prune(backups, newest):
            self._note("backup", newest.removeprefix("step-"))
            prune(backups, newest)

        def noted_delete(backups):
            self._note("deleted")
            delete(backups)

        def noted_write_local_shards(*args):
            self._trigger.reach(self._phase(), "files")
            result = write_local_shards(*args)
            self._trigger.reach(self._phase(), "parts")
            return result

        def noted_write_text(path, text):
            write_text(path, text)
            if os.path.basename(path) == writing.INDEX_FILE:
                self._trigger.reach(self._phase(), "index")

        def noted_replace_index(*args):
            self._trigger.reach(self._phase(), "listed")
            replace_index(*args)
            self._trigger.reach(self._phase(), "renamed")

        Backups._prune, Backups.delete = noted_prune, noted_delete
        writing.write_local_shards = noted_write_local_shards
        storage.write_text = noted_write_text
        writing.replace_index = noted_replace_index

    @staticmethod
    def _phase() -> str:
        """`"backup"` on the thread that writes one, else `"saving"`."""
        is_backup = threading.current_thread().name == "tfdp-save"
        return "backup" if is_backup else "saving"
