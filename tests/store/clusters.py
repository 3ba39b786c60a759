"""Clusters whose members are threads of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tfdp.communication.cluster import Cluster, free_ports
from tfdp.communication.store import Membership

_Result = TypeVar("_Result")


def cluster_of(num_workers: int, host: str = "127.0.0.1") -> Cluster:
    """A cluster on free ports of this machine."""
    return Cluster(tuple(f"{host}:{port}" for port in free_ports(num_workers)))


def on_all(members: Sequence[Any], function: Callable[[Any], _Result]) -> list[_Result]:
    """The results of a function that all members call at once."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(function, members))


@contextlib.contextmanager
def members_of(cluster: Cluster, seconds: float = 30.0) -> Iterator[list[Membership]]:
    """All members of a cluster, joined; they leave at the end.

    If one does not join, the stacks of all threads are printed: they show which thread
    has kept it from doing so.
    """
    ranks = range(cluster.num_workers)
    members = [Membership(of_rank(cluster, rank)) for rank in ranks]
    try:
        try:
            on_all(members, lambda member: member.join(seconds))
        except Exception:
            faulthandler.dump_traceback(2)
            raise
        yield members
    finally:
        on_all(members, Membership.leave)


def of_rank(cluster: Cluster, rank: int) -> Cluster:
    """The cluster as one of its workers sees it."""
    return dataclasses.replace(cluster, task_index=rank)
