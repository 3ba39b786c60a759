"""Exceptions of a lost worker, their message, and the exit code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import tensorflow as tf

from tfdp.ground.text import pluralize

# Exit code of a worker that its watchdog has ended: EX_UNAVAILABLE of sysexits.h. It
# lets a launcher distinguish this worker from one whose script has failed.
EXIT_CODE = 69
# Message of tfdp's assertions in the graph. TensorFlow repeats the message in its
# error, which shows that a collective between workers has failed rather than another
# operation.
COLLECTIVE_FAILED = "a collective between workers failed"
# Cause of the loss of a worker that has ended without an error. The error message then
# has another remedy: all workers must run the same calls.
SCRIPT_ENDED = "its script has ended"


class ClusterChanges(RuntimeError):
    """Error: workers of the job are lost or join. Subclasses say which."""


class WorkersJoin(ClusterChanges):
    """Error: processes join the job; this process may be one of them.

    Args:
        applicants: Sequence of strings, their addresses, `"host:port"`. Defaults to
            none, in a process that joins.
    """

    def __init__(self, applicants: Sequence[str] = ()) -> None:
        number = pluralize(len(applicants), "worker")
        super().__init__(f"{number} joined the job.")
        self.applicants = applicants


class WorkerLost(ClusterChanges):
    """Error: another worker has died, hangs or cannot be reached.

    Keras's `fit`, `evaluate` and `predict` and the calls of tfdp raise it. In a custom
    training loop a collective ends with an error of TensorFlow instead.

    Args:
        text: String, the message.
        rank: Int, rank of the worker.
    """

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class WorkersChanged(RuntimeError):
    """Error in the `with` block of an `ElasticState`: the job has other workers now.

    Workers were lost, or have joined. The strategy has the new workers already, and the
    model and the values of the state are those of the last `commit`. Distribute the
    dataset again, create the `tf.function` of the step anew, and try the step again.

    Args:
        text: String, the message.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)


class NotConnected(tf.errors.UnavailableError):
    """Error: the first collective with a worker could not connect to it in time."""


class PeerStepFailed(tf.errors.UnavailableError):
    """Error: a step has failed on another worker, which has begun the next one."""


@dataclasses.dataclass(frozen=True)
class WorkerFailure:
    """A lost worker and the evidence for it.

    Args:
        rank: Int, rank of the worker.
        cause: String, a clause with the observed symptom.
        own: String, the message that a worker prints about a failure of its own, such
            as a hanging data source, or `""`. Defaults to `""`.
    """

    rank: int
    cause: str
    own: str = ""


def failure_message(
    failure: WorkerFailure,
    address: str,
    place: str,
    bucket: str = "",
    call: str = "",
    command: str = "",
) -> str:
    """Format the error message of a lost worker.

    Args:
        failure: `WorkerFailure`.
        address: String, `"host:port"` of the worker.
        place: String, step, epoch and loop of this worker, or `""`.
        bucket: String, name of the bucket that was being reduced, or `""`.
        call: String, the call in which this worker waits for the lost one, or `""`.
        command: String, the command that shows the flight records, or `""`.

    Example:

    >>> failure = WorkerFailure(1, "its process has ended")
    >>> failure_message(failure, "b:2222", "step 3 of fit")
    'Worker 1 (b:2222) was lost at step 3 of fit: its process has ended. ...'
    """
    if failure.cause == SCRIPT_ENDED and call:
        return (
            f"Worker {failure.rank} ({address}) has ended its script while this worker "
            f"waits for it at {call!r}: every worker has to run the same calls of "
            "Keras and tfdp, including `evaluate` and `predict`."
        )
    where = f" at {place}" if place else ""
    what = f", while {bucket} was reduced" if bucket else ""
    # The cause may quote a sentence of another worker. Its full stop is removed, since
    # the message adds one.
    cause = failure.cause.rstrip(".")
    records = f" and `{command}`" if command else ""
    return (
        f"Worker {failure.rank} ({address}) was lost{where}{what}: {cause}. "
        f"The other workers cannot continue. Check the end of its output{records}, "
        "and restart all workers."
    )


def bucket_of_error(text: str) -> str:
    """Extract the bucket of the failed collective from a TensorFlow error.

    Args:
        text: String, the error's message, which names the node.

    Returns:
        String such as `"bucket 3"`, or `""`.

    Example:

    >>> bucket_of_error("... [[{{node sgd/bucket_3/CollectiveReduceV2}}]]")
    'bucket 3'
    """
    found = re.search(r"(bucket|parameters)_(\d+)[\w]*/\w*Collective", text)
    return f"{found[1]} {found[2]}" if found else ""
