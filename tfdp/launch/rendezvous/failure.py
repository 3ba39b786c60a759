"""Failures of workers and nodes, and errors of the rendezvous."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from tfdp.ground.base.json_fields import from_fields

T = TypeVar("T")

# A job that has lost a node exits with the same code as a worker that has lost a peer:
# EX_UNAVAILABLE of sysexits.h.
NODE_LOST = 69
# The exit code of a worker that its peers report as lost tells more about the cause
# than theirs, so its exit is awaited for this many seconds. Such a worker gives its
# main thread 4 s before it exits.
LOST_EXIT_SECONDS = 6.0


class RendezvousError(Exception):
    """Error of a node that cannot join the job; the text says why and what to do."""


class MalformedMessage(Exception):
    """Error of a message that does not follow the protocol; it ends the connection."""


def from_message(kind: type[T], message: Mapping[str, Any]) -> T:
    """Create an instance of a dataclass from the fields of a message.

    Args:
        kind: The dataclass.
        message: Mapping, the message as it was received.

    Raises:
        MalformedMessage: If a field is missing or has another type.
    """
    try:
        return from_fields(kind, message)
    except (KeyError, TypeError) as error:
        raise MalformedMessage from error


@dataclasses.dataclass(frozen=True)
class Failure:
    """Failure of a worker, which ends the attempt for all workers.

    Args:
        rank: Int, rank of the worker in the whole job.
        code: Int, the worker's exit code as a shell reports it.
        reason: String, how the worker ended, such as `"failed with exit code 1"`.
        log: String, path of the worker's output, or `""`. Defaults to `""`.
        lost_rank: Int, rank of the peer that the worker reports as lost, or `None`.
            Defaults to `None`.
    """

    rank: int
    code: int
    reason: str
    log: str = ""
    lost_rank: int | None = None

    def to_message(self, attempt: int) -> dict[str, Any]:
        """Return the message that reports this failure to node 0.

        Args:
            attempt: Int, the number of the attempt.
        """
        return {"type": "failed", "attempt": attempt, **dataclasses.asdict(self)}
