"""Each worker trains from the newest checkpoint; another process evaluates the last."""

from __future__ import annotations

import os

import keras

from tests.docs.published.bed import Bed
from tests.docs.published.keras_guide import datasets, make_or_restore_model

SAVE_STEPS = 5  # Differs: 100 on the page.


def main(bed: Bed) -> dict:
    strategy = bed.strategy()
    # The first worker's files are kept; the others write to disks of their own.
    own = bed.folder / ("shared" if bed.rank == 0 else f"local-{bed.rank}")
    for name in ("ckpt", "tb"):
        os.makedirs(own / name)
    # Differs: no worker looks into the folder before all are there.
    bed.wait_for_all("started")
    training, validation, _ = datasets(bed)
    with strategy.scope():
        model = make_or_restore_model(str(bed.folder / "shared" / "ckpt"))
    history = model.fit(
        training,
        epochs=2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                # Differs: Keras 3 saves into files with an ending.
                filepath=str(own / "ckpt" / "model.keras"),
                save_freq=SAVE_STEPS,
            ),
            keras.callbacks.TensorBoard(str(own / "tb")),
        ],
    ).history
    bed.wait_for_all("trained")
    # The evaluator of the page; here each worker is one, for itself.
    restored = make_or_restore_model(str(bed.folder / "shared" / "ckpt"))
    return {
        "history": history,
        "weights": dict(enumerate(model.get_weights())),
        "evaluated": restored.evaluate(validation),
        "logs": bed.num_event_files(bed.folder / "shared" / "tb"),
    }
