"""Imports of all built-in features, each of which registers itself on import.

Hooks run in this order. Bucket tuning is last, since it puts its callback in front of
those that the other features add.
"""

# These imports are not sorted: importing a module registers its feature, and hooks run
# in the order of registration.
# isort: off
import tfdp.features.tracking.watch
import tfdp.features.goodput.training
import tfdp.features.local_steps
import tfdp.features.islands.training
import tfdp.features.spikes.training
import tfdp.features.replay.training
import tfdp.features.elastic
import tfdp.features.backup_workers.training
import tfdp.features.micro_batches
import tfdp.features.tuning.rebalancing
import tfdp.features.tuning.callback  # noqa: F401
