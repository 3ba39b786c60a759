"""Local steps: replicas or nodes update independently, and exchange periodically.

- `options`: interval and kind of the exchanges, and checks of a user's arguments.
- `local_steps`: the state of local steps, and when an exchange is due.
- `outer_step`: the update of the common weights by the mean pseudo-gradients.
- `exchanges`: exchange and outer step of each fragment, at once or delayed.
- `in_flight`: pseudo-gradients that were sent and not used yet, their sums on a thread,
  and rounds that continue without late workers.
- `reducers`: sums of pseudo-gradients, optionally compressed, and gradient reducers of
  a node.
- `pace`: inner steps that slow workers skip.
- `training`: the feature of `fit`, which synchronizes replicas before other loops.
"""

from tfdp.features.local_steps.local_steps import LocalSteps, enable, enabled
from tfdp.features.local_steps.options import LocalStepsOptions, OuterOptions
from tfdp.features.local_steps.pace import step_fractions, workers_by_node
from tfdp.features.local_steps.training import LocalStepsFeature
from tfdp.ground.base.feature import register

FEATURE = LocalStepsFeature()
register(FEATURE)

__all__ = [
    "FEATURE",
    "LocalSteps",
    "LocalStepsOptions",
    "OuterOptions",
    "enable",
    "enabled",
    "step_fractions",
    "workers_by_node",
]
