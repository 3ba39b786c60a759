"""A job of three workers, the last of which is late, and then ends."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.harness.fork_server import begin, fork_server
from tests.harness.tf_config import cluster_configs

NUM_WORKERS, STEPS, BATCH_SIZE = 3, 20, 12
_DEADLINE_SECONDS = 90.0


def run(folder: Path) -> tuple[list[int | None], list[str]]:
    """Runs the job; returns the exit codes of the workers and what they have printed.

    Args:
        folder: Path of a folder for the output.
    """
    paths = [folder / f"worker-{rank}.log" for rank in range(NUM_WORKERS)]
    processes = [
        fork_server().Process(target=_serve, args=(*arguments,), daemon=True)
        for arguments in zip(
            range(NUM_WORKERS), cluster_configs(NUM_WORKERS, 1), paths, strict=True
        )
    ]
    end = time.monotonic() + _DEADLINE_SECONDS
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return codes, [path.read_text(errors="replace") for path in paths]


def _serve(rank: int, config: str, path: Path) -> None:
    begin(path, config)
    code = 0
    try:
        _train(rank)
    except Exception:  # noqa: BLE001 the test looks at the output
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(rank: int) -> None:
    """Trains twice: in the second `fit` the last worker is killed."""
    import keras
    import numpy as np

    import tfdp

    class Trouble(keras.callbacks.Callback):
        def __init__(self, kills: bool) -> None:
            super().__init__()
            self._kills = kills

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if rank == NUM_WORKERS - 1 and batch == STEPS // 2:
                if self._kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.5)

    options = tfdp.CommunicationOptions(backup_workers=1, timeout_seconds=30.0)
    strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(STEPS * BATCH_SIZE, 4)).astype("float32")
    for kills in (False, True):
        callbacks = [Trouble(kills)]
        model.fit(x, x[:, :1], BATCH_SIZE, callbacks=callbacks, verbose=0)
        bits = b"".join(weight.tobytes() for weight in model.get_weights())
        print("weights", hashlib.sha256(bits).hexdigest(), flush=True)
