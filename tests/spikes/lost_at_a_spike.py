"""Training that goes back for a spike, and loses a worker at that batch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def train(rank: int, folder: str) -> dict[str, Any]:
    """Trains on all batches with a guard, or on one device on those without the spike.

    The second worker learns of the loss before its guard acts; the first one after.
    """
    import keras
    import tensorflow as tf

    import tfdp
    from tests.harness import common
    from tests.spikes import cases_spikes as spikes

    options = tfdp.CommunicationOptions(on_loss="continue", timeout_seconds=15.0)
    strategy = (
        tf.distribute.get_strategy()
        if rank < 0
        else tfdp.MultiWorkerMirroredStrategy(communication=options)
    )

    class Lost(keras.callbacks.Callback):
        num_batches = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_batches += 1
            if self.num_batches == spikes.BAD + 1:
                if rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank == 1:
                    strategy.extended.worker_group.all_gather("anything")

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = common.compiled(common.mlp())
    callbacks = [
        Lost(),
        tfdp.callbacks.SpikeGuard(action="rollback", **spikes.GUARD),
        tfdp.callbacks.BackupAndRestore(Path(folder) / "backups", 4),
    ]
    if rank < 0:
        history = common.fit(model, *spikes.without(spikes.BAD))
    else:
        history = common.fit(model, *spikes.data(spikes.BAD), callbacks=callbacks)
        assert history.pop("skipped_spikes") == [1]
    return {"history": history, "weights": model.get_weights()}
