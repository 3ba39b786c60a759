"""Training of a job with a worker whose kernel always flips a bit."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any


def train(rank: int, folder: str) -> dict[str, Any]:
    """Trains on three workers, of which the second one is wrong, or on one device."""
    import tensorflow as tf

    import tfdp
    from tests.harness import common
    from tests.replay import cases_replay as replays
    from tests.replay import flips as flipping

    options = tfdp.CommunicationOptions(on_loss="continue", timeout_seconds=30.0)
    strategy = (
        tf.distribute.get_strategy()
        if rank < 0
        else tfdp.MultiWorkerMirroredStrategy(communication=options)
    )
    with strategy.scope():
        model = replays.build()
    if rank < 0:
        history = common.fit(model, *replays.EQUAL)
        return {"history": history, "weights": model.get_weights()}
    setup: Any = types.SimpleNamespace(devices_per_worker=1)
    env: Any = types.SimpleNamespace(setup=setup, rank=rank)
    flips = flipping.Flips(env, 1, flipping.ALWAYS)
    callbacks = [
        flips,
        tfdp.callbacks.ConsistencyCheck(replay=1.0),
        tfdp.callbacks.BackupAndRestore(Path(folder) / "backups", memory_every=1),
    ]
    with flipping.in_kernel(flips):
        history = common.fit(model, *replays.EQUAL, callbacks=callbacks)
    return {"history": history, "weights": model.get_weights()}
