"""The features of training: each registers itself when it is imported, in this order.

Bucket tuning is last, since its callback comes before those that others add.
"""

import tfdp.features.tracking.watch  # isort: skip
import tfdp.features.local_steps  # isort: skip
import tfdp.features.islands.training  # isort: skip
import tfdp.features.tuning.rebalancing  # isort: skip
import tfdp.features.tuning.callback  # isort: skip  # noqa: F401
