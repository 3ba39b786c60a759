"""`fit` with callbacks, and files that open with and without the strategy."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.docs.published.bed import Bed

EPOCHS = 4


def scaled(image, label):
    return tf.cast(image, keras.config.floatx()) / 255, label


def datasets(bed: Bed, batch_size: int) -> tuple:
    """Rows as `tfds` gives them: pictures with a channel, labels of int64."""
    training, test = (
        tf.data.Dataset.from_tensor_slices((x[..., None], y.astype("int64")))
        for x, y in bed.pictures()
    )
    training = training.map(scaled).cache().shuffle(10000).batch(batch_size)
    return training, test.map(scaled).batch(batch_size)


def convolutional_model(metric: object = "accuracy") -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu", input_shape=(28, 28, 1)),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    compile_model(model, metric)
    return model


def compile_model(model: keras.Model, metric: object = "accuracy") -> None:
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
        metrics=[metric],
    )


def decayed_rate(epoch: int) -> float:
    # Differs: after fewer epochs.
    return 1e-3 if epoch < 1 else 1e-4 if epoch < 3 else 1e-5


class KeepRate(keras.callbacks.Callback):
    """Reads the learning rate at the end of each epoch, where the page prints it."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(self.model.optimizer.learning_rate.numpy())


def main(bed: Bed) -> dict:
    strategy = bed.strategy()
    batch_size = bed.per_replica(64, strategy) * strategy.num_replicas_in_sync
    training, test = datasets(bed, batch_size)
    with strategy.scope():
        model = convolutional_model()
    checkpoints = bed.folder / "training_checkpoints"
    keep_rate = KeepRate()
    history = model.fit(
        training,
        epochs=EPOCHS,
        callbacks=[
            keras.callbacks.TensorBoard(log_dir="logs"),
            keras.callbacks.ModelCheckpoint(
                str(checkpoints / "ckpt_{epoch:04d}.weights.h5"),
                save_weights_only=True,
            ),
            keras.callbacks.LearningRateScheduler(decayed_rate),
            keep_rate,
        ],
    ).history
    *_, latest = names = sorted(checkpoints.glob("*"))
    model.load_weights(latest)
    evaluated = [model.evaluate(test)]
    model.save("my_model.keras")
    unreplicated = keras.models.load_model("my_model.keras")
    compile_model(unreplicated)
    evaluated.append(unreplicated.evaluate(test))
    with strategy.scope():
        replicated = keras.models.load_model("my_model.keras")
        compile_model(replicated)
        evaluated.append(replicated.evaluate(test))
    return {
        "history": history,
        "rates": keep_rate.rates,
        "evaluated": evaluated,
        "weights": dict(enumerate(model.get_weights())),
        "checkpoints": len(names),
        "logs": bed.num_event_files(bed.folder / "logs"),
    }
