"""Updates that are left out since the loss or the gradient spikes.

- `step_guard`: the decision in the step, with its state.
- `training`: guards around `fit`.
- `report`: what was left out, for messages and the table at the end.
"""
