"""Checkpoints that move between any number of replicas."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.checkpoint.api import restore, save

__all__ = ["restore", "save"]


def __getattr__(name: str) -> Any:
    # The command line reads indexes without TensorFlow, which `api` needs.
    if name in __all__:
        return getattr(importlib.import_module("tfdp.checkpoint.api"), name)
    raise AttributeError(f"module 'tfdp.checkpoint' has no attribute {name!r}")
