"""Training that goes back for two spikes, in the processes of `interrupted`."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from tests.harness.interrupted import Layout

NUM_EPOCHS, STEPS_PER_EPOCH, SIZE = 3, 8, 8
# From 0, in the order of the steps: the second spike is in the last epoch.
BAD = (10, 21)


def fit(
    layout: Layout,
    rank: int,
    *,
    directory: str | None = None,
    kill_after: int | None = None,
    without: bool = False,
    save_freq: Any = 3,
    memory_every: int | None = None,
    action: str = "rollback",
    accumulation: int = 1,
) -> dict[str, Any]:
    """Trains, and returns weights and history.

    Args:
        layout: `Layout`.
        rank: Int, this worker's.
        directory: String, of the backups, or `None` for no guard and no backups.
        kill_after: Int, the batch after which the last worker is killed, counted with
            those that are made again; or `None`.
        without: Bool, whether the bad batches are not in the data.
        save_freq: As for the callback.
        memory_every: As for the callback.
        action: As for the callback.
        accumulation: Int, micro-batches of an update.
    """
    import keras
    import tensorflow as tf

    import tfdp
    from tests.spikes import cases_spikes
    from tfdp.features.spikes.step_guard import StepGuard

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    if layout.num_workers > 1:
        strategy = tfdp.MultiWorkerMirroredStrategy()
    else:
        import tfdp.testing

        tfdp.testing.logical_cpus(layout.devices)
        strategy = tfdp.MirroredStrategy([f"/cpu:{i}" for i in range(layout.devices)])
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = cases_spikes.with_state()
        model.compile(keras.optimizers.SGD(0.05, 0.9, global_clipnorm=1.0), "mse")
    callbacks: list[Any] = []
    if directory is not None:
        callbacks += [
            tfdp.callbacks.SpikeGuard(action=action, **cases_spikes.GUARD),
            tfdp.callbacks.GradientAccumulation(accumulation),
            tfdp.callbacks.BackupAndRestore(
                directory, save_freq, memory_every=memory_every, background=False
            ),
        ]
    if kill_after is not None and rank == layout.num_workers - 1:
        callbacks.insert(1, _killer(keras, kill_after))
    history: dict[str, list] = {}
    for epochs in (
        [range(NUM_EPOCHS)] if directory else [[i] for i in range(NUM_EPOCHS)]
    ):
        found = model.fit(
            _batches(tf, list(epochs), without=without),
            epochs=len(epochs),
            steps_per_epoch=STEPS_PER_EPOCH if directory else None,
            callbacks=callbacks,
            verbose=0,
        )
        for name, values in found.history.items():
            history.setdefault(name, []).extend(map(float, values))
    weights = {str(i): w for i, w in enumerate(model.get_weights())}
    if directory is not None:
        guard = model.optimizer.features.installed[StepGuard]
        # All losses that were accepted, or the last of them.
        weights["losses"] = guard.values.numpy()
    return {"weights": weights, "history": history}


def _batches(tf: Any, epochs: list[int], *, without: bool) -> Any:
    """The batches of some epochs, each of which has its own."""
    rng = np.random.default_rng(1)
    steps = range(epochs[0] * STEPS_PER_EPOCH, (epochs[-1] + 1) * STEPS_PER_EPOCH)
    x = rng.normal(size=(NUM_EPOCHS * STEPS_PER_EPOCH, SIZE, 6)).astype("float32")
    y = np.sin(x[..., :1])
    for step in BAD:
        y[step, -1] = 1e4 if step == BAD[0] else np.nan
    kept = [i for i in steps if not (without and i in BAD)]
    rows = np.concatenate(x[kept]), np.concatenate(y[kept])
    return tf.data.Dataset.from_tensor_slices(rows).batch(SIZE)


def _killer(keras: Any, after: int) -> Any:
    class Killer(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen += 1
            if self.seen == after:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer()
