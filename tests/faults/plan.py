"""What goes wrong, when, and on which worker: plain values for parent and workers."""

from __future__ import annotations

import dataclasses

KINDS = (
    "kill",
    "stop",
    "cut",
    "raise",
    "exit",
    "sleep",
    "full",
    "crash",
    "damage",
    "sigterm",
    "pause",
    "differ",
    "arrays",
)
# Where a worker meets its fault; `collective` is within one of a step of `fit`; of
# what is damaged between two lives of a job, whose first one is killed while it trains,
# it is the `newest` or `every` backup; `any` is some time after `start`. Of what
# `differ`s and of `arrays` it is what the workers call.
PHASES = (
    "start",
    "made",
    "compiled",
    "between",
    "begin",
    "tracing",
    "training",
    "collective",
    "evaluation",
    "saving",
    "backup",
    "callback",
    "newest",
    "every",
    "any",
    "loops",
    "mixed",
    "by hand",
    "end",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
)
# Of a save: before the worker's own files, after them; on the first worker before the
# new index is written, when it is written but not in place, and when it is.
POINTS = ("files", "parts", "listed", "index", "renamed")
# Packets are lost without a word, or the link is down.
CUTS = ("silent", "plug")
# What workers call: of Keras and of tfdp, and outside of both; or nothing more.
METHODS = ("fit", "evaluate", "predict", "train_on_batch")
LOOPS = (*METHODS, "test_on_batch", "fit by twos", "fit that sums", "save")
BY_HAND = ("steps", "other steps", "steps that gather", "sum", "gather")
END = "end"
# What differs of the arrays for one of `METHODS`.
CHANGES = ("rows", "shape", "dtype", "batch_size")
STEPS_PER_EPOCH = 10


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one worker.

    Args:
        kind: String of `KINDS`.
        phase: String of `PHASES`.
        rank: Int.
        step: Int, step of training, counted from 1, at which it happens; or which
            evaluation or save; or which piece of data that moves in collectives.
        seconds: Float, how long a `sleep` or a `pause` lasts.
        point: String of `POINTS`, where in a save it happens.
        way: String, how a file is damaged (`faults.damage.WAYS`) or the network is
            cut (`CUTS`).
        num_pages: Int, how much room there is left where a disk is `full`.
        hits_all: Bool, whether it happens to all workers, not to one.
        after: Float, seconds after `start`, where the phase is `any`.
        leaves_child: Bool, whether a process that the worker has forked outlives it.
    """

    kind: str
    phase: str
    rank: int
    step: int = 5
    seconds: float = 0.0
    point: str = "parts"
    way: str = ""
    num_pages: int = 0
    hits_all: bool = False
    after: float = 0.0
    leaves_child: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """The phase and the point at which the worker meets it."""
        if self.kind == "damage":
            return "training", ""
        if self.phase == "any":
            return "start", ""
        return self.phase, self.point if self.phase in ("saving", "backup") else ""


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """What the workers of a job do.

    Args:
        num_workers: Int.
        fault: `Fault` or `None`.
        timeout_seconds: Float or `None`, of `CommunicationOptions`.
        epochs: Int, of `STEPS_PER_EPOCH`.
        busy_rank: Int or `None`, a worker whose callbacks take long at the step of
            the fault, so that it is in no collective.
        hosts: Tuple of int, the host of each worker, 0 or 1; empty if all are on one.
        script: String, what the workers run: `"fit"`; before it an evaluation,
            `"evaluate and fit"`; a loop of their own, `"by hand"`; or `"calls"`.
        calls: Tuple of strings by rank: of `LOOPS` or `BY_HAND`, `END`, or of `METHODS`
            with one of `CHANGES`, as in `"fit, rows"`.
    """

    num_workers: int
    fault: Fault | None = None
    timeout_seconds: float | None = None
    epochs: int = 3
    busy_rank: int | None = None
    hosts: tuple[int, ...] = ()
    script: str = "fit"
    calls: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the workers of a job find each other, their files and their faults.

    Args:
        addresses: Tuple of strings, `"host:port"` by rank.
        notes: String, a folder for what workers print and note.
        state: String, a folder for what they save, as they see it.
        namespaces: Tuple by rank of tuples of path and type, which a worker enters.
        cut_commands: Tuple of tuples of strings, which cut the network.
    """

    addresses: tuple[str, ...]
    notes: str
    state: str
    namespaces: tuple[tuple[tuple[str, int], ...], ...]
    cut_commands: tuple[tuple[str, ...], ...] = ()
