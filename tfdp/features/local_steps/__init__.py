"""Local steps: replicas, or nodes, update alone and meet every so many updates.

- `options`: how often they meet, and what they do then; checks of a user's arguments.
- `local_steps`: the state of a step, when the replicas meet, and what Keras's loops do
  with all of it.
- `outer_step`: the update of what all hold in common, by what each has learned.
- `exchanges`: outer steps of each fragment, at once or some updates later.
- `in_flight`: what was sent and is not used yet, who adds it up meanwhile, and rounds
  that go on without workers that are late.
- `reducers`: sums of what replicas have learned, compressed if asked, and of a node.
- `pace`: inner steps that slow workers leave out.
"""

from tfdp.features.local_steps.local_steps import LocalSteps, LocalStepsFeature
from tfdp.features.local_steps.options import LocalStepsOptions, OuterOptions
from tfdp.features.local_steps.pace import shares, workers_by_node
from tfdp.ground.base.feature import register

FEATURE = LocalStepsFeature()
register(FEATURE)

__all__ = [
    "FEATURE",
    "LocalSteps",
    "LocalStepsOptions",
    "OuterOptions",
    "shares",
    "workers_by_node",
]
