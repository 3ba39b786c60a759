"""How the workers of a job have ended, and what they said of it."""

from __future__ import annotations

from tests.faults.job import End, Life

EXIT_LOST, EXIT_KILLED = 69, -9
DEATH_SECONDS = 10.0
_BEGINNINGS = (
    "tfdp: Worker ",
    "tfdp: The other workers ",
    "tfdp: The workers run different collectives",
)


def sentence_of(life: Life, rank: int) -> str:
    """The one sentence with which a worker that could not go on has ended."""
    end = life.ends[rank]
    # Of the watchdog, or below an error of TensorFlow's.
    said = [x[6:] for x in end.log.splitlines() if x.startswith(_BEGINNINGS)]
    if end.code == EXIT_LOST or (end.code == 1 and said):
        return said[0] if len(said) == 1 else ""
    return end.error.partition(": ")[2] if end.code == 1 else ""


def seconds_of(life: Life, rank: int) -> float:
    """From the fault to the error, or to the end where the process was ended."""
    end = life.ends[rank]
    return end.seconds if end.error_seconds is None else end.error_seconds


def is_right(end: End, undisturbed: dict) -> bool:
    """Whether a worker has finished as if nothing had happened."""
    return end.code == 0 and end.result == undisturbed


def told(end: End) -> str:
    """A short account for the table."""
    last = end.log.strip().splitlines()[-1:] or [""]
    return f"code {end.code}, {end.result or end.error or last[0]!r}"
