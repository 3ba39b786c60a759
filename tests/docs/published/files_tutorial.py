"""Models saved under one strategy, loaded under none, another, and one device's."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.docs.published.bed import Bed
from tests.docs.published.fit_tutorial import convolutional_model, datasets


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(5, name="output_layer")

    def call(self, inputs):
        return self.dense(inputs)


def main(bed: Bed) -> dict:
    strategy = bed.strategy()

    def new_model() -> keras.Model:
        with strategy.scope():
            return convolutional_model(keras.metrics.SparseCategoricalAccuracy())

    batch_size = bed.per_replica(64, strategy) * strategy.num_replicas_in_sync
    training, test = datasets(bed, batch_size)
    model = new_model()
    histories = [model.fit(training, epochs=2).history]
    model.save("keras_save.keras")
    restored = keras.models.load_model("keras_save.keras")
    histories.append(restored.fit(training, epochs=2).history)
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        on_a_device = keras.models.load_model("keras_save.keras")
        histories.append(on_a_device.fit(training, epochs=2).history)

    model = new_model()
    tf.saved_model.save(model, "tf_save")
    loaded = tf.saved_model.load("tf_save")
    serve = loaded.signatures["serving_default"]
    pictures = test.map(lambda image, label: image)
    (served,) = (output_of(serve(batch)) for batch in pictures.take(1))
    another = bed.strategy()
    with another.scope():
        loaded = tf.saved_model.load("tf_save")
        serve = loaded.signatures["serving_default"]
        for batch in another.experimental_distribute_dataset(pictures):
            result = output_of(another.run(serve, args=(batch,)))
            break
    of_replicas = another.experimental_local_results(result)
    # What the page has beside needs TensorFlow Hub or is gone with Keras 2: SavedModels
    # by `model.save`, its `options`, `save_spec`.

    rows = bed.per_replica(4, strategy) * strategy.num_replicas_in_sync
    row = tf.range(5, dtype=keras.config.floatx())
    dataset = tf.data.Dataset.from_tensors((row, row)).repeat(100).batch(rows)
    subclassed = Subclassed()
    subclassed.compile(optimizer="adam", loss="mean_squared_error")
    histories.append({"loss": subclassed.fit(dataset, epochs=2).history["loss"]})
    tf.saved_model.save(subclassed, "subclassed")
    assert tf.saved_model.load("subclassed").signatures is not None
    return {
        "histories": dict(enumerate(histories)),
        "weights": dict(enumerate(restored.get_weights())),
        "on_a_device": dict(enumerate(on_a_device.get_weights())),
        "served": served.numpy(),
        **bed.rows("served_by_replicas", of_replicas, len(served)),
    }


def output_of(outputs: dict) -> object:
    (output,) = outputs.values()
    return output
