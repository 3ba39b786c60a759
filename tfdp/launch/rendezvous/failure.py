"""Failures of workers and nodes, and errors of the rendezvous."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Exit code of a job that has lost a node: EX_UNAVAILABLE of sysexits.h, which is also
# the exit code of a worker that has lost a peer.
NODE_LOST = 69
# Seconds to wait for the exit of a worker that its peers report as lost. Such a worker
# gives its main thread 4 s before it exits. Its peers may exit earlier, but its own
# exit code tells more about the cause than theirs.
LOST_EXIT_SECONDS = 6.0


class RendezvousError(Exception):
    """Error of a node that cannot join the job; the text says why and what to do."""


class MalformedMessage(Exception):
    """Error of a message that does not follow the protocol; it is discarded."""


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

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        """Parse a node's report of a failure.

        Args:
            message: Mapping, the message as it was received.

        Returns:
            `Failure`.

        Raises:
            MalformedMessage: If a field is missing or has another type.
        """
        fields = {f.name: message.get(f.name) for f in dataclasses.fields(cls)}
        lost = fields["lost_rank"]
        ints = (fields["rank"], fields["code"], 0 if lost is None else lost)
        texts = (fields["reason"], fields["log"])
        are_ints = all(isinstance(each, int) for each in ints)
        if not are_ints or not all(isinstance(each, str) for each in texts):
            raise MalformedMessage
        return cls(**fields)  # type: ignore[arg-type]
