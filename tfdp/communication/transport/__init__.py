"""Collectives of NumPy arrays between worker processes, without TensorFlow.

Reading order:
    communicator: the interface of a group's collectives, and its errors
    arithmetic: sums in a fixed order; half precision is added in float32
    addresses: which interface a worker listens on, and which host it is on
    flows: data over several connections at once, in both directions
    connections: a connection to another worker, and why it is closed
    mesh: the connections of a worker to all others, and how they find each other
    frames: messages of a head and arrays
    calls: what a member calls, compared with what its peers do
    schedules: the segments of an array, and what a member sends, receives and adds
    socket_communicator: collectives over the connections of a mesh
    shared_memory: collectives of the processes of one host; the best for a group
    rounds: means over those workers that come in time
    mpi_messages: messages over MPI that can be ended
    mpi_communicator: the collectives over MPI
"""

from tfdp.communication.transport.addresses import listening_address
from tfdp.communication.transport.arithmetic import sum_into
from tfdp.communication.transport.calls import new_tag, steps_ahead
from tfdp.communication.transport.communicator import (
    Communicator,
    PeerLost,
    TransportClosed,
    TransportError,
)
from tfdp.communication.transport.connections import Connection
from tfdp.communication.transport.mesh import Mesh
from tfdp.communication.transport.mpi_communicator import (
    MpiCommunicator,
    check_job,
    is_mpi_job,
)
from tfdp.communication.transport.rounds import RoundFollower, RoundLeader
from tfdp.communication.transport.shared_memory import (
    SharedMemoryCommunicator,
    new_communicator,
)
from tfdp.communication.transport.socket_communicator import SocketCommunicator

__all__ = [
    "Communicator",
    "Connection",
    "Mesh",
    "MpiCommunicator",
    "PeerLost",
    "RoundFollower",
    "RoundLeader",
    "SharedMemoryCommunicator",
    "SocketCommunicator",
    "TransportClosed",
    "TransportError",
    "check_job",
    "is_mpi_job",
    "listening_address",
    "new_communicator",
    "new_tag",
    "steps_ahead",
    "sum_into",
]
