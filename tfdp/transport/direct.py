"""Choice of the communicator of a group: shared memory on one host, or TCP."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.transport.communicator import Communicator
from tfdp.transport.mesh import Mesh
from tfdp.transport.shared_memory import SharedMemoryCommunicator
from tfdp.transport.socket_communicator import SocketCommunicator


def new_communicator(mesh: Mesh, ranks: Sequence[int], lane: str) -> Communicator:
    """Connect the workers of a group.

    Args:
        mesh: `Mesh` of this worker.
        ranks: Sequence of int, the members, this worker among them.
        lane: String, what the group is for; all its members give the same one.

    Returns:
        `Communicator`.
    """
    if mesh.share_host(ranks):
        return SharedMemoryCommunicator(mesh, ranks, lane)
    return SocketCommunicator(mesh, ranks, lane)
