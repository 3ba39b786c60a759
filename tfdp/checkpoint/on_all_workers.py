"""Checkpoint actions that all workers run: they succeed on all or fail on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdp.checkpoint import files

# Exchanges that follow file operations have at least this timeout in seconds: the
# worker group's own timeout is meant for messages, and a slow disk or store takes
# longer.
_STORAGE_SECONDS = 3600.0


def run_on_all_workers(
    worker_group: Any,
    path: str,
    verb: str,
    outcome: str,
    topic: str,
    action: Callable[[], Any],
) -> Any:
    """Call a function on every worker; fail on all of them if it fails on one.

    Args:
        worker_group: `WorkerGroup` between the workers.
        path: String, the directory of the checkpoint, for the error message.
        verb: String, past participle of the action for the error message, such as
            `"saved"`.
        outcome: String, a sentence for the error message on the state after a
            failure, such as `"Nothing was loaded."`.
        topic: String, what the action reads or writes, such as `"the index"`, for the
            error if workers call this for different things.
        action: Callable without arguments.

    Returns:
        Result of `action` on this worker.

    Raises:
        ValueError: On every worker, if the first worker that failed had a `ValueError`.
        OSError: On every worker, if the first worker that failed had another error.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 the other workers wait for a reply
        error = caught
    failure = error and [isinstance(error, ValueError), files.error_text(error)]
    limit = storage_timeout(worker_group)
    replies = worker_group.all_gather(f"checkpoint: {topic}", failure, limit)
    failed = [(rank, *reply) for rank, reply in enumerate(replies) if reply]
    if not failed:
        return result
    rank, is_value_error, cause = failed[0]
    is_common = all(reply == replies[0] for reply in replies)
    where = "" if is_common else f"worker {rank}: "
    raise (ValueError if is_value_error else OSError)(
        f"The checkpoint was not {verb}: {where}{cause.rstrip('.')}. {outcome} "
        f"Received: directory={path!r}"
    ) from error


def storage_timeout(worker_group: Any) -> float | None:
    """Return the timeout in seconds of a collective that follows file operations.

    Returns:
        Float, at least an hour, or `None` if the worker group has no timeout.
    """
    seconds = worker_group.timeout_seconds
    return seconds and max(seconds, _STORAGE_SECONDS)
