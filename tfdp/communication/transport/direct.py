"""Choice of the communicator of a group: shared memory on one host, or TCP."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tfdp.communication.transport.communicator import Communicator
from tfdp.communication.transport.mesh import Mesh
from tfdp.communication.transport.shared_memory import SharedMemoryCommunicator
from tfdp.communication.transport.socket_communicator import SocketCommunicator

_logger = logging.getLogger("tfdp.transport")


def new_communicator(mesh: Mesh, ranks: Sequence[int], lane: str) -> Communicator:
    """Connect the workers of a group, and log by what.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, this worker among them.
        lane: String, what the group is for; all its members give the same one.

    Returns:
        `Communicator`.
    """
    kind: type[SocketCommunicator] = SocketCommunicator
    if mesh.share_host(ranks):
        kind = SharedMemoryCommunicator
    communicator = kind(mesh, ranks, lane)
    _logger.info(
        "Worker %d communicates with workers %s by %s",
        mesh.rank,
        ", ".join(str(rank) for rank in ranks if rank != mesh.rank),
        communicator.name,
    )
    return communicator
