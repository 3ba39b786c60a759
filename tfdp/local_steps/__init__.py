"""Local steps: replicas, or nodes, update alone and meet every so many updates.

- `options`: how often they meet, and what they do then; checks of a user's arguments.
- `local_steps`: the state of a step, and the exchange between the replicas.
- `outer_step`: the update of what all hold in common, by what each has learned.
- `node_reducer`: sums over the replicas of a node.
"""

from tfdp.local_steps.local_steps import LocalSteps, average_replicas_of
from tfdp.local_steps.options import LocalStepsOptions, OuterOptions

__all__ = ["LocalSteps", "LocalStepsOptions", "OuterOptions", "average_replicas_of"]
