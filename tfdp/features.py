"""The features of training: each registers itself when it is imported, in this order.

Bucket tuning is last, since its callback comes before those that others add.
"""

import tfdp.tracking.watch  # isort: skip
import tfdp.local_steps  # isort: skip
import tfdp.islands.training  # isort: skip
import tfdp.tuning.rebalancing  # isort: skip
import tfdp.tuning.callback  # isort: skip  # noqa: F401
