"""`fit` in the scope, and training that a second run continues from a checkpoint."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from tests.docs.published.bed import Bed

BATCH_SIZE = 32
NUM_VALIDATION_ROWS = 70


def compiled_model() -> keras.Model:
    inputs = keras.Input(shape=(784,))
    x = keras.layers.Dense(256, activation="relu")(inputs)
    x = keras.layers.Dense(256, activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    model.compile(
        optimizer=keras.optimizers.Adam(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def datasets(bed: Bed) -> list[tf.data.Dataset]:
    """Training, validation and test data."""
    (x, y), (x_test, y_test) = (
        (x.reshape(-1, 784).astype("float32") / 255, y.astype("float32"))
        for x, y in bed.pictures()
    )
    cut = len(x) - NUM_VALIDATION_ROWS
    parts = ((x[:cut], y[:cut]), (x[cut:], y[cut:]), (x_test, y_test))
    return [tf.data.Dataset.from_tensor_slices(p).batch(BATCH_SIZE) for p in parts]


def make_or_restore_model(folder: str) -> keras.Model:
    checkpoints = [os.path.join(folder, name) for name in os.listdir(folder)]
    if not checkpoints:
        return compiled_model()
    return keras.models.load_model(max(checkpoints, key=os.path.getctime))


def main(bed: Bed) -> dict:
    strategy = bed.strategy()
    with strategy.scope():
        model = compiled_model()
        training, validation, test = datasets(bed)
        history = model.fit(training, epochs=2, validation_data=validation).history
        evaluated = model.evaluate(test)
    folder = str(bed.folder / "ckpt")
    os.makedirs(folder, exist_ok=True)  # Differs: not after a look, which races.

    def run_training() -> tuple[dict, keras.Model]:
        strategy = bed.strategy()
        with strategy.scope():
            model = make_or_restore_model(folder)
            checkpoint = keras.callbacks.ModelCheckpoint(
                filepath=folder + "/ckpt-{epoch}.keras", save_freq="epoch"
            )
            fitted = model.fit(
                training,
                epochs=1,
                callbacks=[checkpoint],
                validation_data=validation,
                verbose=2,
            )
        return fitted.history, model

    first, _ = run_training()
    again, model = run_training()
    return {
        "histories": {"fit": history, "first": first, "again": again},
        "evaluated": evaluated,
        "weights": dict(enumerate(model.get_weights())),
        "iterations": int(model.optimizer.iterations.numpy()),
        "files": len(os.listdir(folder)),
    }
