"""Failures of workers and nodes, in words, and errors of the rendezvous."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# EX_UNAVAILABLE of sysexits.h, as a worker ends that has lost another one.
NODE_LOST = 69
# A worker that the others have lost gives its main thread 4 s, and then ends itself:
# they may end before it, and its exit code says more than theirs.
LOST_EXIT_SECONDS = 6.0


class RendezvousError(Exception):
    """A node cannot take part; the text says why and what to do."""


class MalformedMessage(Exception):
    """Something was received that no node of the job sends; nothing of it is used."""


class Lost(Exception):
    """A connection to a node of the job has ended; the text says how."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """End of a worker that ends the attempt of all.

    Args:
        rank: Int, of the worker in the whole job.
        code: Int, the exit code as a shell reports it.
        reason: String, how it ended, such as `"failed with exit code 1"`.
        log: String, the file of its output, or `""`.
        lost_rank: Int, the worker that it says was lost, or `None`. Defaults to
            `None`.
    """

    rank: int
    code: int
    reason: str
    log: str = ""
    lost_rank: int | None = None

    def to_message(self, attempt: int) -> dict[str, Any]:
        """Return the message that carries it.

        Args:
            attempt: Int, the number of the attempt.
        """
        return {"type": "failed", "attempt": attempt, **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        """Read the message of a node.

        Args:
            message: Mapping.

        Returns:
            `Failure`.

        Raises:
            MalformedMessage: If a field is missing or has another type.
        """
        fields = {f.name: message.get(f.name) for f in dataclasses.fields(cls)}
        lost = fields["lost_rank"]
        ints = (fields["rank"], fields["code"], 0 if lost is None else lost)
        texts = (fields["reason"], fields["log"])
        is_right = all(isinstance(each, int) for each in ints)
        if not is_right or not all(isinstance(each, str) for each in texts):
            raise MalformedMessage
        return cls(**fields)  # type: ignore[arg-type]
