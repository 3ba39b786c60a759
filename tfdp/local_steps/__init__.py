"""Local steps: replicas, or nodes, update alone and meet every so many updates.

- `options`: how often they meet, and what they do then; checks of a user's arguments.
- `local_steps`: the state of a step, and when the replicas meet.
- `outer_step`: the update of what all hold in common, by what each has learned.
- `exchanges`: outer steps of each fragment, at once or some updates later.
- `exchange_reducer`: sums of what replicas have learned, compressed if asked.
- `in_flight`: what was sent and is not used yet, and who adds it up meanwhile.
- `pace`: inner steps that slow workers leave out.
- `rounds`: exchanges that go on without workers that are late.
- `node_reducer`: sums over the replicas of a node.
- `meetings`: when all replicas are made alike.
"""

from tfdp.local_steps.local_steps import LocalSteps
from tfdp.local_steps.meetings import (
    average_replicas_of,
    batches_between_meetings,
    go_to_meeting,
)
from tfdp.local_steps.options import LocalStepsOptions, OuterOptions
from tfdp.local_steps.pace import paced, shares, workers_by_node

__all__ = [
    "LocalSteps",
    "LocalStepsOptions",
    "OuterOptions",
    "average_replicas_of",
    "batches_between_meetings",
    "go_to_meeting",
    "paced",
    "shares",
    "workers_by_node",
]
