"""Data-parallel training for Keras 3 on TensorFlow.

Importing this package is cheap: TensorFlow is loaded when a name that needs
it is used, so that the command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdp import user_code
from tfdp.onednn import ask_for_onednn as _ask_for_onednn
from tfdp.tracking.watch import watch_trackers as _watch_trackers

if TYPE_CHECKING:
    # Type checkers and editors see the names that `__getattr__` loads.
    from tfdp import callbacks, checkpoint, compression, data, optimizers, testing
    from tfdp.links import Link, Links
    from tfdp.losses.all_gather import all_gather
    from tfdp.optimizer.distributed import DistributedOptimizer
    from tfdp.options import CommunicationOptions
    from tfdp.plans.schedules import scale_learning_rate
    from tfdp.strategy.strategy import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        auto_strategy,
    )
    from tfdp.tracking.first_worker import track_each_worker

__version__ = "0.1.0"

_HOMES = {
    "all_gather": "tfdp.losses.all_gather",
    "CommunicationOptions": "tfdp.options",
    "DistributedOptimizer": "tfdp.optimizer.distributed",
    "Link": "tfdp.links",
    "Links": "tfdp.links",
    "MirroredStrategy": "tfdp.strategy.strategy",
    "MultiWorkerMirroredStrategy": "tfdp.strategy.strategy",
    "auto_strategy": "tfdp.strategy.strategy",
    "callbacks": "tfdp.callbacks",
    "checkpoint": "tfdp.checkpoint",
    "compression": "tfdp.compression",
    "data": "tfdp.data",
    "optimizers": "tfdp.optimizers",
    "scale_learning_rate": "tfdp.plans.schedules",
    "testing": "tfdp.testing",
    "track_each_worker": "tfdp.tracking.first_worker",
}
__all__ = [
    "CommunicationOptions",
    "DistributedOptimizer",
    "Link",
    "Links",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "all_gather",
    "auto_strategy",
    "callbacks",
    "checkpoint",
    "compression",
    "data",
    "optimizers",
    "scale_learning_rate",
    "testing",
    "track_each_worker",
]


_ask_for_onednn()
user_code.watch_start()
_watch_trackers()

if not TYPE_CHECKING:  # a type checker would take any name for one of this package

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'tfdp' has no attribute {name!r}")
        module = importlib.import_module(_HOMES[name])
        value = module if _HOMES[name] == f"tfdp.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
