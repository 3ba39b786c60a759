"""Process groups and the collectives that run on them.

Reading order:
    groups: process groups, their keys, launch order on each device, and the interface
        of transports
    calls: functions with collectives, called in several threads
    instance_keys: keys that distinguish the collectives of a group
    tensorflow_transport: TensorFlow's collectives: NCCL, and a ring over gRPC
    process_transport: between CPU processes, by `tfdp.communication.transport`
    process_collectives: collectives of all replicas over one communicator per process
    collective_thread: tensors from a graph to a thread and back
    background: functions of the replicas' tensors that run concurrently with steps
    primitives: a replica as a member of a group, and its collectives
    algorithms: all-reduce by ring, tree, halving-doubling and hierarchical
    adasum: gradients combined pair by pair instead of summed
    gather: all-gather of rows of unequal length
    timing: times of collectives, recorded inside the graph
    step_events: other measurements of a step for a monitor
"""

from tfdp.communication.collectives.adasum import adasum, adasum_across_nodes
from tfdp.communication.collectives.algorithms import (
    FLAT,
    Level,
    halving_doubling,
    hierarchical,
    node_levels,
    ring,
    tree,
)
from tfdp.communication.collectives.calls import one_at_a_time
from tfdp.communication.collectives.groups import (
    LaunchOrder,
    ProcessGroup,
    Transport,
    align_group_keys,
    device_positions,
    is_collective,
)
from tfdp.communication.collectives.primitives import (
    Member,
    padded_length,
)
from tfdp.communication.collectives.process_transport import (
    ProcessTransport,
    end_failed_call,
)
from tfdp.communication.collectives.tensorflow_transport import TensorFlowTransport

__all__ = [
    "FLAT",
    "LaunchOrder",
    "Level",
    "Member",
    "ProcessGroup",
    "ProcessTransport",
    "TensorFlowTransport",
    "Transport",
    "adasum",
    "adasum_across_nodes",
    "align_group_keys",
    "device_positions",
    "end_failed_call",
    "halving_doubling",
    "hierarchical",
    "is_collective",
    "node_levels",
    "one_at_a_time",
    "padded_length",
    "ring",
    "tree",
]
