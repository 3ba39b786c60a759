"""Key-value store of a job, over which its workers exchange texts outside of steps.

Worker 0 hosts the store, and another worker if it ends; it needs no TensorFlow. Reading
order:
    contents: what the store holds, as a sequence of changes
    replication: the copy on a second worker
    server: requests of the members, all-gathers and heartbeats
    hosts: connection of a member to the process that hosts the store
    client: the store as a member uses it, with answers that may come later
    admission: what a process proves, and how it learns of a job that runs
    membership: this process as a member of its cluster: joins, shares a store, leaves
"""

from tfdp.communication.connection.messages import MessageTooLong
from tfdp.communication.store.admission import (
    Admission,
    JobState,
    ask_job,
    ask_workers,
    have_all_joined,
)
from tfdp.communication.store.client import Gathering, HostLost, Store
from tfdp.communication.store.membership import (
    JobAlreadyRunning,
    Membership,
    own_version,
)
from tfdp.communication.store.server import Server, beat_seconds

__all__ = [
    "Admission",
    "Gathering",
    "HostLost",
    "JobAlreadyRunning",
    "JobState",
    "Membership",
    "MessageTooLong",
    "Server",
    "Store",
    "ask_job",
    "ask_workers",
    "beat_seconds",
    "have_all_joined",
    "own_version",
]
