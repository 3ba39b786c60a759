"""What a worker says when it cannot go on without another one."""

from __future__ import annotations

import dataclasses
import re

# The exit code of a worker that had to end itself: EX_UNAVAILABLE of sysexits.h.
EXIT_CODE = 69


class WorkerLost(RuntimeError):
    """Another worker has died, stands still or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A worker that is lost, and what was seen of it.

    Args:
        rank: Int.
        cause: String, what was seen.
    """

    rank: int
    cause: str


def message_of(verdict: Verdict, address: str, place: str, bucket: str = "") -> str:
    """The sentence for people.

    Args:
        verdict: `Verdict`.
        address: String, `"host:port"` of the worker.
        place: String, where this worker was, or `""`.
        bucket: String, what was being reduced, or `""`.

    Example:

    >>> message_of(Verdict(1, "its process has ended"), "b:2222", "step 3 of fit")
    'Worker 1 (b:2222) was lost at step 3 of fit: its process has ended. ...'
    """
    where = f" at {place}" if place else ""
    what = f", while {bucket} was reduced" if bucket else ""
    return (
        f"Worker {verdict.rank} ({address}) was lost{where}{what}: {verdict.cause}. "
        "The others cannot go on without it: see the end of its output, and start "
        "all workers again."
    )


def bucket_in(text: str) -> str:
    """Which bucket the failed collective of an error of TensorFlow belongs to.

    Args:
        text: String, the error's message, which names the node.

    Returns:
        String such as `"bucket 3"`, or `""`.

    Example:

    >>> bucket_in("... [[{{node sgd/bucket_3/CollectiveReduceV2}}]]")
    'bucket 3'
    """
    found = re.search(r"(bucket|parameters)_(\d+)[\w]*/\w*Collective", text)
    return f"{found[1]} {found[2]}" if found else ""
