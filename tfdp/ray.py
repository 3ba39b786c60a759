"""Ray Train for Keras 3: a trainer, a reporting callback, and shards of Ray Data.

Needs `pip install tfdp[ray]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdp.features.ray.report import ReportCallback, dataset_shard
    from tfdp.features.ray.trainer import KerasTrainer

# Module of each public name. It is imported at the first use of the name, since the
# driver of a Ray job needs no TensorFlow.
_HOMES = {
    "KerasTrainer": "tfdp.features.ray.trainer",
    "ReportCallback": "tfdp.features.ray.report",
    "dataset_shard": "tfdp.features.ray.report",
}
__all__ = ["KerasTrainer", "ReportCallback", "dataset_shard"]


# `__getattr__` is hidden from type checkers, which would accept any name of this module
# with it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'tfdp.ray' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "ray":
                raise
            raise ImportError(
                "`tfdp.ray` needs Ray Train: pip install 'tfdp[ray]'. "
                f"Received: tfdp.ray.{name}"
            ) from error


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
