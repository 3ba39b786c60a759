"""Key-value store of a job: what its workers tell each other before and beside steps.

Worker 0 hosts the store, and another worker if it ends; it needs no TensorFlow. Reading
order:
    contents: what the store holds, as a sequence of changes
    replication: the copy on a second worker
    server: requests of the members, all-gathers and heartbeats
    hosts: connection of a member to the process that hosts the store
    client: the store as a member uses it, with answers that may come later
    membership: this process as a member of its cluster: joins, shares a store, leaves
"""

from tfdp.communication.connection.messages import MessageTooLong
from tfdp.communication.store.client import Gathering, HostLost, Store
from tfdp.communication.store.membership import Admission, Membership
from tfdp.communication.store.server import Server, beat_seconds

__all__ = [
    "Admission",
    "Gathering",
    "HostLost",
    "Membership",
    "MessageTooLong",
    "Server",
    "Store",
    "beat_seconds",
]
