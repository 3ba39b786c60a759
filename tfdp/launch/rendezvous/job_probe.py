"""Probe of node 0: asks the workers of all nodes whether they train."""

from __future__ import annotations

import threading
import time

from tfdp.communication.cluster import Cluster
from tfdp.communication.cluster.address import join_address
from tfdp.communication.connection.secret import derive_secret
from tfdp.communication.store import ask_workers
from tfdp.ground.base.threads import start_thread
from tfdp.launch.rendezvous.coordinator import NodeAddresses

# Node 0 knows only from the workers' answers whether they train, so it asks them at
# this interval in seconds.
_ASK_SECONDS = 1.0


def cluster_of_places(
    places: NodeAddresses,
    secret: str,
    attempt_id: str,
    rank: int = 0,
    **settings: object,
) -> Cluster:
    """Return the `Cluster` of the workers of all nodes, with one of them as its task.

    Args:
        places: The IP address and the worker ports of each node.
        secret: String, the job's secret.
        attempt_id: String, id of the attempt; the workers' secret depends on it.
        rank: Int, rank of the worker. Defaults to 0.
        **settings: Further arguments of `Cluster`.
    """
    return Cluster(
        tuple(join_address(host, port) for host, ports in places for port in ports),
        task_index=rank,
        secret=derive_secret(secret, f"workers {attempt_id}"),
        **settings,  # type: ignore[arg-type]
    )


class JobProbe:
    """Probe whose thread asks the workers once a second whether they train together.

    The connections are authenticated by the secret.

    Args:
        secret: String, the job's secret.

    Attributes:
        seen_at: Float, time by `time.monotonic` of the last answer that they train, or
            `None` if none has come.
        members: Set of strings, `"host:port"` of the workers that train by that answer.
    """

    def __init__(self, secret: str) -> None:
        self.seen_at: float | None = None
        self.members: set[str] = set()
        self._secret = secret
        self._cluster: Cluster | None = None
        # The lock keeps `forget` from running between the check that an answer belongs
        # to the current attempt and the record of the answer.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = start_thread("tfdp job probe", self._run)

    def watch(self, places: NodeAddresses, attempt_id: str) -> None:
        """From now on, ask the workers of an attempt whether they train together.

        Args:
            places: The IP address and the worker ports of each node.
            attempt_id: String, id of the attempt; the workers' secret depends on it.
        """
        self._cluster = cluster_of_places(places, self._secret, attempt_id, elastic=1)

    def forget(self) -> None:
        """Set `seen_at` to `None`, and ask no worker until the next `watch`."""
        with self._lock:
            self._cluster = self.seen_at = None

    def close(self) -> None:
        """End the thread, after the request that is running."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        """Ask the workers each second until `close`; record answers that they train."""
        while not self._is_closed.wait(_ASK_SECONDS):
            cluster = self._cluster
            state = cluster and ask_workers(cluster, cluster.workers)
            with self._lock:
                latest = self._cluster
                if state and cluster and latest and latest.secret == cluster.secret:
                    self.members, self.seen_at = set(state.workers), time.monotonic()
