"""Data-parallel training for Keras 3 on TensorFlow.

Importing this package is cheap: TensorFlow is imported on the first use of a name that
needs it, so that the command line starts at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdp.features.tracking.watch import disable_trackers as _watch_trackers
from tfdp.ground import user_code
from tfdp.ground.base.feature import register_module as _register_module
from tfdp.ground.onednn import enable_onednn as _enable_onednn

if TYPE_CHECKING:
    # Type checkers and editors cannot see the names that `__getattr__` imports at run
    # time, so these imports declare them.
    from tfdp import (
        callbacks,
        checkpoint,
        compression,
        data,
        optimizers,
        options,
        testing,
    )
    from tfdp.communication.coordination.watch.errors import WorkerLost, WorkersChanged
    from tfdp.features.elastic_state import ElasticState
    from tfdp.features.tracking.watch import track_each_worker
    from tfdp.ground.options import CommunicationOptions
    from tfdp.ground.plans.schedules import scale_learning_rate
    from tfdp.training.losses.all_gather import all_gather
    from tfdp.training.optimizer.distributed import DistributedOptimizer
    from tfdp.training.strategy.strategy import (
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        auto_strategy,
    )

__version__ = "0.2.0"

# Module of each public name. It is imported at the first use of the name, so that
# `import tfdp` does not load TensorFlow.
_HOMES = {
    "all_gather": "tfdp.training.losses.all_gather",
    "CommunicationOptions": "tfdp.ground.options",
    "DistributedOptimizer": "tfdp.training.optimizer.distributed",
    "ElasticState": "tfdp.features.elastic_state",
    "MirroredStrategy": "tfdp.training.strategy.strategy",
    "MultiWorkerMirroredStrategy": "tfdp.training.strategy.strategy",
    "WorkerLost": "tfdp.communication.coordination.watch.errors",
    "WorkersChanged": "tfdp.communication.coordination.watch.errors",
    "auto_strategy": "tfdp.training.strategy.strategy",
    "callbacks": "tfdp.callbacks",
    "checkpoint": "tfdp.checkpoint",
    "compression": "tfdp.compression",
    "data": "tfdp.data",
    "optimizers": "tfdp.optimizers",
    "options": "tfdp.options",
    "scale_learning_rate": "tfdp.ground.plans.schedules",
    "testing": "tfdp.testing",
    "track_each_worker": "tfdp.features.tracking.watch",
}
# Public names that have moved to other modules since the previous version. Scripts that
# use the old place still run, with a warning.
_MOVED = {"Link": "tfdp.options", "Links": "tfdp.options"}
__all__ = [
    "CommunicationOptions",
    "DistributedOptimizer",
    "ElasticState",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "WorkerLost",
    "WorkersChanged",
    "all_gather",
    "auto_strategy",
    "callbacks",
    "checkpoint",
    "compression",
    "data",
    "optimizers",
    "options",
    "scale_learning_rate",
    "testing",
    "track_each_worker",
]


_enable_onednn()
user_code.watch_start()
_watch_trackers()
_register_module("tfdp.features.built_in")

# `__getattr__` is hidden from type checkers: with it, they would accept any name in
# this package.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        module_name = _HOMES.get(name) or _MOVED.get(name)
        if module_name is None:
            raise AttributeError(f"module 'tfdp' has no attribute {name!r}")
        if name in _MOVED:
            user_code.warn(
                f"`tfdp.{name}` is now `{module_name}.{name}`; the old name will be "
                "removed."
            )
        module = importlib.import_module(module_name)
        value = module if module_name == f"tfdp.{name}" else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
