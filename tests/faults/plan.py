"""What goes wrong, when, and on which worker: plain values for parent and workers."""

from __future__ import annotations

import dataclasses

KINDS = ("kill", "stop", "raise", "exit", "sleep")
PHASES = ("start", "training", "evaluation", "saving", "callback")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one worker.

    Args:
        kind: String of `KINDS`.
        phase: String of `PHASES`.
        rank: Int.
        step: Int, step of training, counted from 1, at which it happens; or which
            evaluation or save.
        seconds: Float, how long a `sleep` lasts.
    """

    kind: str
    phase: str
    rank: int
    step: int = 5
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """What the workers of a job do.

    Args:
        num_workers: Int.
        fault: `Fault` or `None`.
        timeout_seconds: Float or `None`, of `CommunicationOptions`.
        epochs: Int, of ten steps each.
        busy_rank: Int or `None`, a worker whose callbacks take long at the step of
            the fault, so that it is in no collective.
    """

    num_workers: int
    fault: Fault | None = None
    timeout_seconds: float | None = None
    epochs: int = 3
    busy_rank: int | None = None
