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
- `training_group`: the replicas whose steps are one program.
"""

from tfdp.local_steps.local_steps import LocalSteps
from tfdp.local_steps.meetings import (
    average_replicas_of,
    batches_between_meetings,
    go_to_meeting,
)
from tfdp.local_steps.options import LocalStepsOptions, OuterOptions
from tfdp.local_steps.pace import paced, shares, workers_by_node
from tfdp.local_steps.training_group import (
    TrainingGroup,
    groups_of_ranks,
    merging_group,
    training_group,
)

__all__ = [
    "LocalSteps",
    "LocalStepsOptions",
    "OuterOptions",
    "TrainingGroup",
    "average_replicas_of",
    "batches_between_meetings",
    "go_to_meeting",
    "groups_of_ranks",
    "merging_group",
    "paced",
    "shares",
    "training_group",
    "workers_by_node",
]
