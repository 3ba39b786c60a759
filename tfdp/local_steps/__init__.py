"""Local steps: replicas update alone, and average their state every so many updates."""

from tfdp.local_steps.local_steps import (
    LocalSteps,
    average_replicas_of,
    check_start_step,
    check_sync_every,
)

__all__ = ["LocalSteps", "average_replicas_of", "check_start_step", "check_sync_every"]
