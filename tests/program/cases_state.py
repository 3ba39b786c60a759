"""Variables that a step writes and the optimizer does not train."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.harness.env import Env
from tests.program.programs import (
    FEATURES,
    NUM_ROWS,
    TOKENS,
    Perceptron,
    Programs,
    fit_layers,
    fit_model,
    named,
    register,
    targets,
)

LAYERS = Programs()
STEPS = Programs()


def _state(layer: keras.layers.Layer, shape: tuple, **options: Any) -> Any:
    return layer.add_weight(
        shape=shape, trainable=False, **({"initializer": "zeros"} | options)
    )


def _around(make: Any) -> Any:
    return lambda: [layers.Dense(3), make(), layers.Dense(1)]


class Quantizer(layers.Layer):
    """A codebook that follows moving averages, see van den Oord et al. 2017.

    Args:
        kind: String, the way in which it writes.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def build(self, shape: Any) -> None:
        normal = keras.initializers.RandomNormal(seed=3)
        self.codes = _state(self, (4, shape[-1]), initializer=normal)
        self.sums = _state(self, (4, shape[-1]), initializer=normal)
        self.counts = _state(self, (4,), initializer="ones")

    def call(self, x: Any, training: bool = False) -> Any:
        codes = ops.convert_to_tensor(self.codes)
        nearest = ops.argmin(ops.sum((x[:, None] - codes) ** 2, axis=-1), axis=1)
        chosen = ops.one_hot(nearest, 4, dtype=x.dtype)
        if training:
            self._update(x, nearest, chosen)
        found = ops.matmul(chosen, codes)
        self.add_loss(0.1 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        return x + ops.stop_gradient(found - x)

    def _update(self, x: Any, nearest: Any, chosen: Any) -> None:
        counts = ops.sum(chosen, axis=0)
        sums = ops.matmul(ops.transpose(chosen), x)
        if self.kind == "assign":
            self.counts.assign(0.9 * self.counts + 0.1 * counts)
            self.sums.assign(0.9 * self.sums + 0.1 * sums)
        elif self.kind == "assign_add":
            self.counts.assign_add(0.1 * (counts - self.counts))
            self.sums.assign_sub(0.1 * (self.sums - sums))
        elif self.kind == "scatter_nd_add":
            indices = tf.cast(nearest, tf.int32)[:, None]
            self.counts.value.scatter_nd_add(indices, tf.ones_like(x[:, 0]))
            self.sums.value.scatter_nd_add(indices, x)
        else:
            self.counts.value.scatter_add(
                tf.IndexedSlices(tf.ones_like(x[:, 0]), nearest)
            )
            self.sums.value.scatter_add(tf.IndexedSlices(x, nearest))
        self.codes.assign(
            ops.convert_to_tensor(self.sums) / (1e-3 + self.counts[:, None])
        )


for _kind in ("assign", "assign_add", "scatter_nd_add", "scatter_add"):
    LAYERS.layers(f"codebook_by_{_kind}", _around(lambda kind=_kind: Quantizer(kind)))


class Means(layers.Layer):
    """Running means and largest values of what it has seen."""

    def build(self, shape: Any) -> None:
        self.mean = _state(self, (shape[-1],))
        self.largest = _state(self, (shape[-1],))
        self.total = _state(self, ())

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.largest.assign(ops.maximum(self.largest, ops.max(x, axis=0)))
            self.total.assign_add(ops.sum(ops.abs(x)))
        return x - self.mean + 0.01 * self.largest


LAYERS.layers("running_means", _around(Means), predicts=True)


class RowsSeen(layers.Layer):
    """Counts rows, batches and tokens."""

    def build(self, shape: Any) -> None:
        self.rows = _state(self, (), dtype="int32")
        self.batches = _state(self, (), dtype="int64")
        self.positive = _state(self, (), dtype="int32")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign_add(ops.shape(x)[0])
            self.batches.assign_add(1)
            self.positive.assign(
                self.positive + ops.sum(ops.cast(x[:, 0] > 0, "int32"))
            )
        return x


@LAYERS.add
def rows_seen(env: Env) -> dict:
    layer = None

    def build() -> list:
        nonlocal layer
        layer = RowsSeen()
        return [layer, layers.Dense(1)]

    results = fit_layers(env, build, epochs=1)
    assert layer is not None
    assert int(layer.rows.numpy()) == NUM_ROWS
    assert int(layer.batches.numpy()) == 3
    assert int(layer.positive.numpy()) == (FEATURES[:, 0] > 0).sum()
    return results


class Queue(layers.Layer):
    """The last features in a queue, see He et al. 2020."""

    def build(self, shape: Any) -> None:
        self.queue = _state(self, (20, shape[-1]), initializer="ones")

    def call(self, x: Any, training: bool = False) -> Any:
        similar = ops.softmax(ops.matmul(x, ops.transpose(self.queue)))
        found = x + 0.1 * ops.matmul(similar, self.queue)
        if training:
            kept = ops.concatenate([ops.stop_gradient(x), self.queue], axis=0)[:20]
            self.queue.assign(kept)
        return found


class RingQueue(layers.Layer):
    """The last features at places that a counter gives."""

    def build(self, shape: Any) -> None:
        self.queue = _state(self, (20, shape[-1]), initializer="ones")
        self.place = _state(self, (), dtype="int32")

    def call(self, x: Any, training: bool = False) -> Any:
        similar = ops.softmax(ops.matmul(x, ops.transpose(self.queue)))
        found = x + 0.1 * ops.matmul(similar, self.queue)
        if training:
            count = ops.shape(x)[0]
            places = (self.place + tf.range(count)) % 20
            self.queue.assign(
                tf.tensor_scatter_nd_update(
                    ops.convert_to_tensor(self.queue),
                    places[:, None],
                    ops.stop_gradient(x),
                )
            )
            self.place.assign((self.place + count) % 20)
        return found


class ScatteredQueue(RingQueue):
    """The same, by `scatter_update`."""

    def call(self, x: Any, training: bool = False) -> Any:
        similar = ops.softmax(ops.matmul(x, ops.transpose(self.queue)))
        found = x + 0.1 * ops.matmul(similar, self.queue)
        if training:
            count = ops.shape(x)[0]
            places = (self.place + tf.range(count)) % 20
            self.queue.value.scatter_update(
                tf.IndexedSlices(tf.stop_gradient(x), places)
            )
            self.place.assign((self.place + count) % 20)
        return found


class ScatteredByPairs(RingQueue):
    """The same, by `scatter_nd_update`."""

    def call(self, x: Any, training: bool = False) -> Any:
        similar = ops.softmax(ops.matmul(x, ops.transpose(self.queue)))
        found = x + 0.1 * ops.matmul(similar, self.queue)
        if training:
            count = ops.shape(x)[0]
            places = (self.place + tf.range(count)) % 20
            self.queue.value.scatter_nd_update(places[:, None], tf.stop_gradient(x))
            self.place.assign((self.place + count) % 20)
        return found


for _make in (Queue, RingQueue, ScatteredQueue, ScatteredByPairs):
    LAYERS.layers(f"queue_{_make.__name__}", _around(_make))


class Sliced(layers.Layer):
    """Writes a slice of its state, and a part of it in a branch."""

    def build(self, shape: Any) -> None:
        self.seen = _state(self, (3, shape[-1]))

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.value[1].assign(tf.reduce_max(x, axis=0))
            mean = tf.reduce_mean(x, axis=0)
            tf.cond(
                mean[0] > 0,
                lambda: self.seen.value[2].assign(mean),
                lambda: self.seen.value[2].assign(2.0 * mean),
            )
        return x + 0.1 * ops.sum(self.seen, axis=0)


LAYERS.layers("slices_of_a_state", _around(Sliced))


class WrittenInABranch(layers.Layer):
    """Writes only where the batch says so, and in a loop."""

    def build(self, shape: Any) -> None:
        self.seen = _state(self, (shape[-1],))
        self.looped = _state(self, (shape[-1],))

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            mean = tf.reduce_mean(x, axis=0)

            def write() -> Any:
                self.seen.assign(self.seen + mean)
                return tf.constant(0)

            tf.cond(mean[0] > 0, write, lambda: tf.constant(1))

            def halve(i: Any) -> Any:
                self.looped.assign(0.5 * self.looped + mean)
                return i + 1

            tf.while_loop(lambda i: i < 2, halve, [tf.constant(0)])
        return x + self.seen + 0.1 * self.looped


LAYERS.layers("written_in_a_branch", _around(WrittenInABranch))


class WithAggregation(layers.Layer):
    """States of each aggregation, assigned and added to.

    Args:
        aggregation: String.
    """

    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self.aggregation = aggregation

    def build(self, shape: Any) -> None:
        options = {"aggregation": self.aggregation}
        self.sums = _state(self, (shape[-1],), **options)
        self.means = _state(self, (shape[-1],), **options)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.sums.assign_add(ops.sum(x, axis=0))
            self.means.assign(0.5 * self.means + 0.5 * ops.mean(x, axis=0))
        return x + 0.01 * self.sums + self.means


for _aggregation in ("mean", "sum", "only_first_replica", "none"):
    LAYERS.layers(
        f"aggregation_{_aggregation}",
        _around(lambda aggregation=_aggregation: WithAggregation(aggregation)),
    )


@LAYERS.add
def lookup_table(env: Env) -> dict:
    with env.scope():
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(
                tf.range(9), tf.range(9, 0, -1), tf.int32, tf.int32
            ),
            default_value=0,
        )
    return fit_layers(
        env,
        lambda: [
            layers.Lambda(table.lookup, output_shape=(5,), dtype="int32"),
            layers.Embedding(10, 3),
            layers.Flatten(),
            layers.Dense(1),
        ],
        x=TOKENS,
        predicts=True,
    )


class Counts(layers.Layer):
    """Adds how often each row's class has occurred before, and the number of classes.

    Args:
        table: Mutable table.
    """

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def call(self, x: Any, training: bool = False) -> Any:
        classes = tf.argmax(x, axis=1)
        before = tf.ensure_shape(self.table.lookup(classes), [None])
        number = tf.cast(self.table.size(), x.dtype)
        total = tf.reduce_sum(self.table.export()[1])
        if training:
            self.table.insert(classes, before + 1.0)
        return x + 0.1 * before[:, None] + 0.01 * (number + total)


@LAYERS.add
def table_that_is_read_and_written(env: Env) -> dict:
    options = {"key_dtype": tf.int64, "value_dtype": tf.float32, "default_value": 0.0}
    table = tf.lookup.experimental.MutableHashTable(**options)
    return fit_layers(env, _around(lambda: Counts(table)))


@LAYERS.add
def text_and_a_growing_variable_made_outside_of_the_scope(env: Env) -> dict:
    text = tf.Variable("x")
    seen = tf.Variable(tf.zeros([0]), shape=[None])

    class Growing(layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            length = tf.cast(tf.strings.length(text), x.dtype)
            result = x + 0.1 * length + tf.reduce_sum(seen)
            if training:
                text.assign(tf.strings.join([text, "y"]))
                seen.assign(tf.concat([seen, [0.1]], axis=0))
            return result

    return fit_layers(env, _around(Growing))


@LAYERS.add
def table_that_a_loop_reads_is_refused_or_right(env: Env) -> dict:
    options = {"key_dtype": tf.int64, "value_dtype": tf.float32, "default_value": 0.0}

    class Looping(layers.Layer):
        def __init__(self, reads_before: bool) -> None:
            super().__init__()
            self.reads_before = reads_before
            self.table = tf.lookup.experimental.MutableHashTable(**options)

        def call(self, x: Any, training: bool = False) -> Any:
            key = tf.constant(3, tf.int64)
            self.table.insert(key, self.table.lookup(key) + 1.0)
            before = self.table.lookup(key)

            def add(i: Any, total: Any) -> tuple:
                value = before if self.reads_before else self.table.lookup(key)
                return i + 1, total + tf.reshape(value, [])

            return x + tf.while_loop(lambda i, _: i < 2, add, [0, 0.0])[1]

    is_refused = env.strategy is not None and env.strategy.extended.num_local > 1
    if is_refused:
        with pytest.raises(ValueError, match="reads, in a loop, a state that"):
            fit_layers(env, _around(lambda: Looping(False)))
        keras.utils.set_random_seed(1)
    # Where it is refused, what the sentence advises gives the same.
    return fit_layers(env, _around(lambda: Looping(is_refused)))


# States of steps.


class Centres(Perceptron):
    """Centres of classes that follow their rows, see Wen et al. 2016."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = self.add_weight(
            shape=(2, 5), initializer="zeros", trainable=False
        )

    def train_step(self, data: tuple) -> dict:
        x, y = data
        classes = tf.cast(y[:, 0] > 0, tf.int32)
        with tf.GradientTape() as tape:
            hidden = self.hidden(x)
            near = hidden - tf.gather(tf.convert_to_tensor(self.centres), classes)
            loss = tf.reduce_mean(tf.square(self.last(hidden) - y))
            loss += 0.1 * tf.reduce_mean(tf.reduce_sum(tf.square(near), axis=1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        sums = tf.math.unsorted_segment_sum(near, classes, 2)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(near[:, 0]), classes, 2)
        self.centres.assign_add(0.5 * sums / (1.0 + counts[:, None]))
        return {"loss": loss}


@STEPS.add
def centres_of_classes(env: Env) -> dict:
    return fit_model(env, Centres)


@STEPS.add
def variable_made_outside_of_the_scope(env: Env) -> dict:
    seen = tf.Variable(tf.zeros([6]), trainable=False)
    count = tf.Variable(0)

    class Model(Perceptron):
        def train_step(self, data: tuple) -> dict:
            x, _ = data
            seen.assign(0.5 * seen + tf.reduce_mean(x, axis=0))
            count.assign_add(tf.shape(x)[0])
            logs = super().train_step(data)
            return {**logs, "seen": tf.reduce_sum(seen), "count": count}

    results = fit_model(env, Model, epochs=1)
    return {**results, "seen": seen.numpy(), "count": count.numpy()}


@STEPS.add
def plain_variable_of_the_scope(env: Env) -> dict:
    with env.scope():
        seen = tf.Variable(tf.zeros([6]), trainable=False)
        count = tf.Variable(0, trainable=False)
        first = tf.Variable(
            tf.zeros([6]),
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        mean = tf.Variable(
            tf.zeros([6]), trainable=False, aggregation=tf.VariableAggregation.MEAN
        )

    class Model(Perceptron):
        def train_step(self, data: tuple) -> dict:
            x, _ = data
            seen.assign(0.5 * seen + tf.reduce_mean(x, axis=0))
            count.assign_add(tf.shape(x)[0])
            first.assign_add(tf.reduce_sum(x, axis=0))
            mean.assign(tf.reduce_max(x, axis=0) + mean)
            logs = super().train_step(data)
            return {**logs, "seen": tf.reduce_sum(seen)}

    results = fit_model(env, Model, epochs=1)
    found = {"seen": seen, "count": count, "first": first, "mean": mean}
    return {**results, **{name: v.numpy() for name, v in found.items()}}


@STEPS.add
def variable_of_partial_sums(env: Env) -> dict:
    """A variable on read adds up what each replica has: here, rows."""
    with env.scope():
        total = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    class Model(Perceptron):
        def train_step(self, data: tuple) -> dict:
            x, _ = data
            total.assign_add(tf.reduce_sum(x))
            return super().train_step(data)

    results = fit_model(env, Model, epochs=1)
    return {**results, "total": total.numpy()}


class AverageTeacher(Perceptron):
    """A teacher whose weights follow those of the student after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)]
        )
        self.teacher.trainable = False

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            apart = tf.reduce_mean(tf.square(predicted - self.teacher(x)))
            loss = self.compute_loss(x, y, predicted) + 0.3 * apart
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for own, follower in zip(
            self.trainable_variables, self.teacher.weights, strict=True
        ):
            follower.assign(0.8 * follower + 0.2 * own)
        return {"loss": loss, "apart": apart}


@STEPS.add
def teacher_that_follows_after_the_update(env: Env) -> dict:
    return fit_model(env, AverageTeacher)


@STEPS.add
def weights_clipped_after_the_update(env: Env) -> dict:
    class Model(Perceptron):
        def train_step(self, data: tuple) -> dict:
            logs = super().train_step(data)
            for variable in self.trainable_variables:
                variable.assign(tf.clip_by_value(variable, -0.4, 0.4))
            return logs

    return fit_model(env, Model)


@STEPS.add
def states_with_three_steps_per_execution(env: Env) -> dict:
    return fit_layers(
        env,
        _around(lambda: Quantizer("assign")),
        compiles={"steps_per_execution": 3},
    )


@STEPS.add
def states_of_train_on_batch(env: Env) -> dict:
    with env.scope():
        model = keras.Sequential([keras.Input((6,)), *_around(Means)()])
        model.compile(keras.optimizers.SGD(0.05), loss="mse")
    y = targets(FEATURES)
    losses = [
        model.train_on_batch(FEATURES[i : i + 15], y[i : i + 15]) for i in (0, 15, 30)
    ]
    return {
        "losses": np.array(losses, dtype="float64"),
        "weights": dict(enumerate(map(np.asarray, model.get_weights()))),
    }


register(
    "programs_of_states",
    "states that layers and steps write",
    named(
        "codebook_by_scatter_nd_add",
        "table_that_is_read_and_written",
        "variable_made_outside_of_the_scope",
        of=[*LAYERS, *STEPS],
    ),
)
for _name, _programs in ("layers", LAYERS), ("steps", STEPS):
    register(
        f"states_that_{_name}_write",
        "variables that are not trained",
        _programs,
        same_as="programs_of_states",
    )
