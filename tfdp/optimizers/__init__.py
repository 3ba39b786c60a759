"""Optimizers that Keras lacks.

- `lars`: LARS, for training with large batches.
"""

from tfdp.optimizers.lars import LARS

__all__ = ["LARS"]
