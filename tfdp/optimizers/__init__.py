"""Optimizers that Keras lacks: LARS."""

from tfdp.optimizers.lars import LARS

__all__ = ["LARS"]
