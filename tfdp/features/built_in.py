"""Imports of all built-in features, each of which registers itself on import.

Hooks run in this order. Bucket tuning is last, since it puts its callback in front of
those that the other features add.
"""

import tfdp.features.tracking.watch  # isort: skip
import tfdp.features.goodput.training  # isort: skip
import tfdp.features.local_steps  # isort: skip
import tfdp.features.islands.training  # isort: skip
import tfdp.features.spikes.training  # isort: skip
import tfdp.features.replay.training  # isort: skip
import tfdp.features.elastic  # isort: skip
import tfdp.features.backup_workers.training  # isort: skip
import tfdp.features.micro_batches  # isort: skip
import tfdp.features.tuning.rebalancing  # isort: skip
import tfdp.features.tuning.callback  # isort: skip  # noqa: F401
