"""Which of several workers logs, known before a strategy is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfdp.communication.cluster import rank_of_process


@dataclasses.dataclass
class _State:
    """What is known of this worker."""

    each_logs: bool = False
    rank: int | None = None
    undo: list[Callable[[], None]] = dataclasses.field(default_factory=list)


_state = _State()


def track_each_worker() -> None:
    """Let every worker log to Weights & Biases and MLflow, each to a run of its own.

    Without it the first worker alone logs. Call it before `wandb.init` and before
    MLflow is used, on all workers. On a single worker it has no effect.

    Example:

    >>> import tfdp
    >>> tfdp.track_each_worker()

    Source: https://docs.wandb.ai/models/track/log/distributed-training ("Track each
    process separately")
    """
    _state.each_logs = True
    while _state.undo:
        _state.undo.pop()()


def when_each_logs(undo: Callable[[], None]) -> None:
    """Have a function called once every worker is to log.

    Args:
        undo: Function without arguments.
    """
    _state.undo.append(undo)


def note_rank(rank: int) -> None:
    """Note the rank that a strategy has found.

    Args:
        rank: Int.
    """
    _state.rank = rank


def is_silent() -> bool:
    """Return whether another worker than this one logs for all.

    What is wrong in the environment is told where a strategy is made.
    """
    if _state.each_logs:
        return False
    try:
        rank = rank_of_process() if _state.rank is None else _state.rank
    except ValueError:
        return False
    return rank > 0
