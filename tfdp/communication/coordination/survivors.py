"""Agreement of the workers that are left after the loss of others."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

from tfdp.communication.cluster import describe_workers
from tfdp.communication.connection.handshake import ConnectionFailed
from tfdp.communication.coordination.clock import clock
from tfdp.communication.store import HostLost, Membership
from tfdp.ground.text import pluralize, say

# A waiting worker asks the store every `_CHECK_SECONDS` which workers are missing, to
# notice further losses. A failed attempt is repeated after `_RETRY_SECONDS`.
_CHECK_SECONDS, _RETRY_SECONDS = 0.25, 0.1
# The port of a lost worker stays open for a moment while its process ends, so the
# survivors wait at most this long for the port to close.
_END_SECONDS = 1.0
# A worker whose port still accepts connections may answer late, so the others wait for
# it at most this long by default.
_LIMIT_SECONDS = 60.0


def find_survivors(
    membership: Membership,
    lost: Sequence[int],
    applicants: Sequence[str],
    min_workers: int,
    limit_seconds: float | None = None,
) -> tuple[list[int], list[str]]:
    """Agree with the other workers on which of them continue, and which processes join.

    The worker that hosts the job's store decides. Another worker, the standby, has a
    copy of the answer in case the host ends.

    Args:
        membership: `Membership` of this process in the cluster that has lost workers.
        lost: Sequence of ints, ranks of workers that are known to be lost.
        applicants: Sequence of strings, `"host:port"` of the processes that join.
        min_workers: Int, least number of workers that may continue. If too few are
            left, they wait for others to join.
        limit_seconds: Float or `None`, longest wait for a worker that may still answer.
            Defaults to `None`, 60 seconds.

    Returns:
        Tuple of two lists: ranks of the workers that are left, in order, and
        `"host:port"` of the processes that join them.

    Raises:
        RuntimeError: If too few workers are left, or if the lost ones may continue on
            the other side of a network that is cut.
        HostLost: If the store is lost.
    """
    limit = limit_seconds or _LIMIT_SECONDS
    begin = clock.now()
    while True:
        try:
            survivors, joining = _agree(membership, lost, applicants, limit)
            break
        except HostLost:
            # Both workers with a copy of the store, its host and the standby, are lost.
            # An empty store replaces it, and the survivors try to agree again until the
            # time limit.
            if clock.now() - begin > limit:
                raise
        with contextlib.suppress(ConnectionFailed):
            membership.restart_store(lost)
        time.sleep(_RETRY_SECONDS)
    if len(survivors) + len(joining) >= min_workers:
        return survivors, joining
    return _await_applicants(membership, survivors, min_workers, limit)


def _agree(
    membership: Membership, lost: Sequence[int], applicants: Sequence[str], limit: float
) -> tuple[list[int], list[str]]:
    """Agree, by two all-gathers over the store, on the workers that are left or join.

    `limit` is the longest wait in seconds for a worker. The other arguments and the
    results are those of `find_survivors`.
    """
    if lost:
        membership.store.expel(list(lost))
    came = _gather(membership, "who is left", list(applicants), limit)
    joining = sorted({each for value in came if value is not None for each in value})
    gone = [rank for rank, value in enumerate(came) if value is None]
    # The store's host sends all workers the same values, so all of them decide alike.
    seen = _gather(membership, "who has ended", _await_ended(membership, gone), limit)
    survivors = [rank for rank, value in enumerate(seen) if value is not None]
    ended = {rank for value in seen if value is not None for rank in value}
    _check_majority(membership, survivors, ended)
    return survivors, joining


def _await_ended(membership: Membership, gone: Sequence[int]) -> list[int]:
    """Return which of the lost workers' processes have ended.

    The call waits for at most a second for the others to end, since the port of a
    worker whose script has ended stays open for a moment.

    Args:
        membership: `Membership` of this process.
        gone: Sequence of ints, ranks of the lost workers.

    Returns:
        List of ints, the ranks of those whose processes have ended.
    """
    begin = clock.now()
    while len(ended := membership.ended(gone)) < len(gone):
        if clock.now() - begin > _END_SECONDS:
            break
        time.sleep(_RETRY_SECONDS)
    return ended


def _await_applicants(
    membership: Membership, survivors: list[int], min_workers: int, limit: float
) -> tuple[list[int], list[str]]:
    """Wait until enough processes have applied to join the workers that are left.

    Further workers may be lost during the wait.

    Args:
        membership: `Membership` of this process in the cluster that has lost workers.
        survivors: List of ints, ranks of the workers that are left.
        min_workers: Int, least number of workers that may continue.
        limit: Float, longest wait in seconds: for all applicants, and for each answer
            of another worker.

    Returns:
        Tuple of two lists: ranks of the workers that are left, in order, and
        `"host:port"` of the processes that join them.

    Raises:
        RuntimeError: If too few have joined after `limit` seconds.
    """
    num_workers = membership.cluster.num_workers
    if membership.cluster.rank == survivors[0]:
        text = _describe_lack(survivors, num_workers, min_workers)
        say(f"{text}: waiting for others to join.")
    begin = clock.now()
    for number in itertools.count():
        lost = sorted(set(range(num_workers)) - set(survivors))
        own = [membership.applicants(lost), clock.now() - begin > limit]
        answers = _gather(membership, f"join {number}", own, limit)
        survivors = [rank for rank, answer in enumerate(answers) if answer is not None]
        found = {each for survivor in survivors for each in answers[survivor][0]}
        if len(survivors) + len(found) >= min_workers:
            return survivors, sorted(found)
        # All workers use the decision of the first worker that is left, since the
        # workers' clocks may reach the limit at different times.
        _, is_over = answers[survivors[0]]
        if is_over:
            break
        time.sleep(_CHECK_SECONDS)
    raise RuntimeError(
        f"{_describe_lack(survivors, num_workers, min_workers)}; none joined within "
        f"{limit:.0f} s. Start the job again: it resumes from its newest backup."
    )


def _describe_lack(survivors: Sequence[int], num_workers: int, min_workers: int) -> str:
    """Format a clause: "1 worker of 4 is left, and `min_workers` is 2"."""
    left = pluralize(len(survivors), "worker")
    verb = "is" if len(survivors) == 1 else "are"
    return f"{left} of {num_workers} {verb} left, and `min_workers` is {min_workers}"


def _gather(
    membership: Membership, topic: str, value: Any, limit_seconds: float
) -> list[Any]:
    """Gather a value of each worker that is left; `None` stands for a lost worker.

    A missing worker is declared lost if its process has ended, or at the time limit.

    Args:
        membership: `Membership` of this process.
        topic: String, key of the values.
        value: Value of this worker, which JSON must support.
        limit_seconds: Float, longest wait for a worker that may still answer.
    """
    cluster, store = membership.cluster, membership.store
    gathering = store.gather(topic, json.dumps(value), is_of_living=True)
    begin = clock.now()
    # A loss that is known already has called `Store.wake`, whose effect lasts. With
    # `may_wake`, it would end each wait at once.
    while (texts := gathering.texts(_CHECK_SECONDS, may_wake=False)) is None:
        missing = [rank for rank in gathering.missing() if rank != cluster.rank]
        is_over = clock.now() - begin > limit_seconds
        if gone := missing if is_over else membership.ended(missing):
            store.expel(gone)
    return [None if text is None else json.loads(text) for text in texts]


def _check_majority(
    membership: Membership, survivors: Sequence[int], ended: set[int]
) -> None:
    """Raise `RuntimeError` unless only the workers that are left can continue.

    Workers whose processes may still run may continue on the other side of a network
    that is cut. So only a majority may continue, or the half that has worker 0.

    Args:
        membership: `Membership` of this process.
        survivors: Sequence of ints, ranks of the workers that are left.
        ended: Set of ints, ranks of the workers whose processes have ended.
    """
    cluster = membership.cluster
    lost = [rank for rank in range(cluster.num_workers) if rank not in survivors]
    has_majority = 2 * len(survivors) + (0 in survivors) > cluster.num_workers
    if not has_majority and not ended.issuperset(lost):
        raise RuntimeError(
            f"Lost the connection to {describe_workers(cluster, lost)}, which may "
            "still run: as the smaller part of the job, this worker does not continue."
        )
