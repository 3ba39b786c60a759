"""Collectives of NumPy arrays between worker processes, without TensorFlow.

Reading order:
    communicator: interface of a group's collectives, and its errors
    arithmetic: sums in a fixed order; half precision is added in float32
    addresses: the interface that a worker listens on, and a key of its host
    flows: data over several connections at once, in both directions
    connections: a connection to another worker, and the reason that it is closed
    mesh: connections of a worker to all others, through addresses in a store
    frames: messages of a JSON head and arrays
    calls: headers of collectives, compared between members
    schedules: segments of an array, and the order in which members exchange them
    socket_communicator: collectives over the connections of a mesh
    shared_memory: collectives of processes on one host; choice of a communicator
    rounds: means over the workers that arrive in time
    quorum: sums of the first contributions of each step
    mpi_messages: messages over MPI that can be cancelled
    mpi_communicator: collectives over MPI
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
    is_mpi_job,
    start_and_check_job,
)
from tfdp.communication.transport.quorum import (
    QuorumFollower,
    QuorumLeader,
    QuorumMember,
    Share,
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
    "QuorumFollower",
    "QuorumLeader",
    "QuorumMember",
    "RoundFollower",
    "RoundLeader",
    "Share",
    "SharedMemoryCommunicator",
    "SocketCommunicator",
    "TransportClosed",
    "TransportError",
    "is_mpi_job",
    "listening_address",
    "new_communicator",
    "new_tag",
    "start_and_check_job",
    "steps_ahead",
    "sum_into",
]
