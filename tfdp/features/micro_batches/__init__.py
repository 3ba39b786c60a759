"""Micro-batches found by trial: a step that runs out of memory is made in more parts.

- `kept_batch`: the batch of the running step, kept so that the step can be repeated.
- `division`: the part of a step: the number of micro-batches, and what has changed.
- `memory_search`: memory of steps below a known limit, and of steps with twice the
  rows.
- `search`: the feature of `fit`: doubles the number when a step runs out of memory,
  halves it below a known limit, and stores it for the next run.
"""

from tfdp.features.micro_batches.division import MicroBatches
from tfdp.features.micro_batches.search import MicroBatchSearch
from tfdp.ground.base.feature import register

register(MicroBatchSearch())

__all__ = ["MicroBatches"]
