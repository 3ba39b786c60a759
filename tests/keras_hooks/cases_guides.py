"""Training steps as users write them for one device: the same numbers on replicas.

Each has the structure of a step that Keras's guides teach: what its loss is made
of, which metrics it updates and what it returns. Nothing in them knows of replicas,
but for those that were written for stock `tf.distribute` and scale by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

import tfdp
from tests.exactness.cases_exactness import precision
from tests.harness import common, registry
from tests.harness.env import Env

case = registry.case
layers, losses, ops = keras.layers, keras.losses, keras.ops
MIRRORED = ("mirrored",)
TWO_WORKERS = ("two_workers",)
# Three batches and one of three rows, which two replicas share as two and one.
NUM_ROWS = 27
EVEN = 24
LATENT = 3


def _sgd(rate: float = 0.05) -> keras.optimizers.Optimizer:
    # A wrong factor on all gradients would not show with Adam.
    return keras.optimizers.SGD(rate, momentum=0.9)


def _functional(kind: type, *, units: int = 4, outputs: int = 1, **options) -> Any:
    """A perceptron as a model of the given class; options go to the hidden layer."""
    inputs = keras.Input((common.NUM_FEATURES,))
    hidden = layers.Dense(units, activation="tanh", **options)(inputs)
    return kind(inputs, layers.Dense(outputs)(hidden))


def _compiled(kind: type, **options: Any) -> Callable[[], keras.Model]:
    """Builds such a model, compiled with SGD and nothing else."""

    def build():
        model = _functional(kind, **options)
        model.compile(optimizer=_sgd())
        return model

    return build


def _train(
    env: Env,
    build: Callable[[], keras.Model],
    *data: Any,
    evaluates: bool = False,
    **options: Any,
) -> dict:
    """History, weights and evaluation after two epochs."""
    model = common.build_in_scope(env, build)
    history = common.fit(model, *data, epochs=2, **options)
    results = {"history": history, "weights": env.weights(model)}
    if evaluates:
        batch = {"batch_size": common.BATCH_SIZE}
        results["evaluate"] = model.evaluate(
            *data, verbose=0, return_dict=True, **batch
        )
    return results


def _regression(num_rows: int = NUM_ROWS) -> tuple:
    return common.regression_data(num_rows)


def _classification(num_rows: int = NUM_ROWS) -> tuple:
    return common.classification_data(num_rows)


def _apply(model: keras.Model, tape: tf.GradientTape, loss: Any) -> None:
    variables = model.trainable_variables
    model.optimizer.apply_gradients(
        zip(tape.gradient(loss, variables), variables, strict=True)
    )


class OwnLoss(keras.Model):
    """A step whose loss is any function of targets and predictions.

    It returns the loss as a plain number.
    """

    def own_loss(self, y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self(x, training=True))
        _apply(self, tape, loss)
        return {"loss": loss}


@case("A custom `train_step` with `tf.reduce_mean`")
def step_with_a_mean(env: Env) -> dict:
    return _train(env, _compiled(OwnLoss), *_regression())


@case("The same, with a last batch of one row: others have none")
@registry.same_as("step_with_a_mean")
def step_with_a_mean_over_no_rows(env: Env) -> dict:
    return _train(env, _compiled(OwnLoss), *_regression(25))


class MeanOfRows(OwnLoss):
    """Per-row losses by Keras's function, and their mean."""

    def own_loss(self, y, y_pred):
        per_row = losses.mean_absolute_error(y, y_pred)
        return ops.mean(per_row) + 0.1 * ops.sum(ops.square(self.weights[0]))


class SumOfRows(OwnLoss):
    """A sum over the batch."""

    def own_loss(self, y, y_pred):
        return 0.1 * tf.reduce_sum(tf.square(y - y_pred))


class LossOfEachRow(OwnLoss):
    """No reduction at all: the gradient of a vector is that of its sum."""

    def own_loss(self, y, y_pred):
        return 0.1 * losses.mean_squared_error(y, y_pred)

    def train_step(self, data):
        return {"loss": tf.reduce_mean(super().train_step(data)["loss"])}


class SumOfLossObject(OwnLoss):
    """A loss object of Keras that sums, times a number."""

    def own_loss(self, y, y_pred):
        return 0.1 * losses.MeanSquaredError(reduction="sum")(y, y_pred)


_REST = {"same_as": "step_with_a_mean"}


def _step_case(name: str, covers: str, kind: type, **options: Any) -> None:
    def function(env: Env) -> dict:
        return _train(env, _compiled(kind), *_regression())

    function.__module__ = __name__
    registry.register(name, function, covers, **options)


for _name, _covers, _kind in (
    ("mean_and_a_penalty", "A penalty of weights", MeanOfRows),
    ("sum", "A sum over the batch", SumOfRows),
    ("loss_of_each_row", "The gradient of a loss that is not reduced", LossOfEachRow),
    ("loss_object_that_sums", '`reduction="sum"` in a custom step', SumOfLossObject),
):
    _step_case(f"step_with_a_{_name}", _covers, _kind, **_REST)


class OwnComputeLoss(keras.Model):
    """`compute_loss` overridden, with a tracker of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        loss = tf.reduce_mean(tf.square(y_pred - y)) + tf.add_n(self.losses)
        self.tracker.update_state(loss)
        return loss

    def reset_metrics(self):
        self.tracker.reset_state()

    @property
    def metrics(self):
        return [self.tracker]


@case("`compute_loss` overridden, with penalties of weights")
def compute_loss_overridden(env: Env) -> dict:
    return _own_compute_loss(env)


@case("`evaluate` with `compute_loss` overridden")
@registry.same_as("compute_loss_overridden")
def evaluation_with_compute_loss_overridden(env: Env) -> dict:
    return _own_compute_loss(env, evaluates=True)


def _own_compute_loss(env: Env, **options: Any) -> dict:
    build = _compiled(OwnComputeLoss, kernel_regularizer="l2", bias_regularizer="l1")
    return _train(env, build, *_regression(), **options)


class FirstExample(keras.Model):
    """`compute_loss` of Keras, and a loop over the metrics that `compile` made."""

    def train_step(self, data):
        x, y, weight = data if len(data) == 3 else (*data, None)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self._update(loss, y, y_pred, weight)

    def test_step(self, data):
        x, y = data[:2]
        y_pred = self(x, training=False)
        return self._update(self.compute_loss(y=y, y_pred=y_pred), y, y_pred, None)

    def _update(self, loss, y, y_pred, weight):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=weight)
        return {m.name: m.result() for m in self.metrics}


def _first_example() -> keras.Model:
    model = _functional(FirstExample)
    return common.compiled(model, _sgd(), metrics=["mae"])


@case("`compute_loss` and `update_state(loss)`", tol=1e-9)
@registry.same_as("compute_loss_overridden")
def step_with_compute_loss_in_float64(env: Env) -> dict:
    with precision("float64"):
        x, y = (array.astype("float64") for array in _regression())
        return _train(env, _first_example, x, y, evaluates=True)


@case("`sample_weight` and `class_weight` in a custom step")
@registry.same_as("sample_weight")
def step_with_weights_of_samples_and_classes(env: Env) -> dict:
    x, y = _regression()
    weight = np.linspace(0.1, 2.0, NUM_ROWS).astype("float32")
    signs = (y > 0).astype("float32")
    by_class = {"class_weight": {0: 0.5, 1: 2.0}}
    return {
        "samples": _train(env, _first_example, x, y, sample_weight=weight),
        "classes": _train(env, _first_example, x, signs, **by_class),
    }


class LowLevel(keras.Model):
    """Its own loss object, metrics, `metrics` and `test_step`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        _apply(self, tape, loss)
        return self._update(loss, y, y_pred)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self._update(self.loss_fn(y, y_pred), y, y_pred)

    def _update(self, loss, y, y_pred):
        self.loss_tracker.update_state(loss)
        self.mae.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae.result()}


@case("A step with a loss object and metrics of its own")
@registry.same_as("compute_loss_overridden")
def low_level_step(env: Env) -> dict:
    return _train(env, _compiled(LowLevel), *_regression(), evaluates=True)


class MixedScaling(OwnLoss):
    """One loss by Keras's object and one by hand, both means."""

    def own_loss(self, y, y_pred):
        by_keras = losses.MeanSquaredError()(y, y_pred)
        return 0.5 * by_keras + 0.3 * tf.reduce_mean(tf.abs(y - y_pred))


class TwiceApplied(OwnLoss):
    """The same gradients applied twice."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = losses.MeanSquaredError()(y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


_step_case(
    "step_with_two_ways_to_scale",
    "Keras's scaling and one by hand",
    MixedScaling,
    same_as="average_loss_of_the_global_batch",
)
_step_case(
    "gradients_applied_twice",
    "`apply`, then `apply_gradients`",
    TwiceApplied,
    same_as="gan_with_two_optimizers",
)


class ByReplicas(OwnLoss):
    """Written for stock strategies: divided by the number of replicas."""

    def own_loss(self, y, y_pred):
        replicas = self.distribute_strategy.num_replicas_in_sync
        return tf.reduce_mean(tf.square(y - y_pred)) / replicas

    def train_step(self, data):
        return {"loss": super().train_step(data)["loss"] * _num_replicas(self)}


def _num_replicas(model: keras.Model) -> int:
    return model.distribute_strategy.num_replicas_in_sync


class AverageLoss(OwnLoss):
    """Written for stock strategies: TensorFlow's mean over all replicas."""

    options: ClassVar[dict[str, Any]] = {}

    def own_loss(self, y, y_pred):
        per_row = losses.mean_squared_error(y, y_pred)
        return tf.nn.compute_average_loss(per_row, **self.options)


class AverageLossOfTheBatch(AverageLoss):
    """The same, told the size of the global batch."""

    options: ClassVar[dict[str, Any]] = {"global_batch_size": common.BATCH_SIZE}


class ScaledRegularization(AverageLoss):
    """TensorFlow's mean, and its scaling of penalties."""

    def own_loss(self, y, y_pred):
        penalty = tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        return super().own_loss(y, y_pred) + penalty


def _scaled_by_hand(env: Env, kind: type, num_rows: int = EVEN) -> dict:
    build = _compiled(kind, kernel_regularizer="l2")
    return _train(env, build, *_regression(num_rows))


@case("A loss divided by the number of replicas")
@registry.same_as("gan_with_two_optimizers")
def loss_divided_by_the_replicas(env: Env) -> dict:
    return _scaled_by_hand(env, ByReplicas)


@case("`tf.nn.compute_average_loss`")
@registry.same_as("average_loss_of_the_global_batch")
def average_loss(env: Env) -> dict:
    return _scaled_by_hand(env, AverageLoss)


@case("`tf.nn.compute_average_loss(global_batch_size=...)`")
def average_loss_of_the_global_batch(env: Env) -> dict:
    return _scaled_by_hand(env, AverageLossOfTheBatch, NUM_ROWS)


@case("`tf.nn.scale_regularization_loss`")
@registry.same_as("average_loss_of_the_global_batch")
def scaled_regularization_loss(env: Env) -> dict:
    return _scaled_by_hand(env, ScaledRegularization)


class Adversaries(keras.Model):
    """A generator and a critic with an optimizer and a tracker each.

    The noise is a function of the batch: what is drawn differs between replicas.
    """

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((LATENT,)), layers.Dense(common.NUM_FEATURES)]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((common.NUM_FEATURES,)),
                layers.Dense(4, activation="tanh"),
                layers.Dense(1),
            ]
        )
        self.critic_tracker = keras.metrics.Mean(name="critic_loss")
        self.generator_tracker = keras.metrics.Mean(name="generator_loss")

    @property
    def metrics(self):
        return [self.critic_tracker, self.generator_tracker]

    def compile(self, critic_optimizer, generator_optimizer):
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def noise(self, real):
        return tf.sin(7.0 * real[:, :LATENT])

    def update(self, part, optimizer, loss):
        with tf.GradientTape() as tape:
            value = loss()
        variables = part.trainable_weights
        optimizer.apply(tape.gradient(value, variables), variables)
        return value

    def train_step(self, real):
        noise = self.noise(real)

        def critic_loss():
            both = tf.concat([self.generator(noise), real], axis=0)
            rows = tf.shape(real)[0]
            wanted = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
            entropy = losses.BinaryCrossentropy(from_logits=True)
            return entropy(wanted + 0.05, self.critic(both))

        def generator_loss():
            wanted = tf.zeros((tf.shape(real)[0], 1))
            entropy = losses.BinaryCrossentropy(from_logits=True)
            return entropy(wanted, self.critic(self.generator(noise)))

        loss = self.update(self.critic, self.critic_optimizer, critic_loss)
        self.critic_tracker.update_state(loss)
        loss = self.update(self.generator, self.generator_optimizer, generator_loss)
        self.generator_tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


class WithGradientPenalty(Adversaries):
    """Wasserstein losses, a penalty of inner gradients; plain losses as logs."""

    @property
    def metrics(self):
        return []

    def penalty(self, real, fake):
        between = real + 0.3 * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between, training=True)
        slopes = tape.gradient(scores, between)
        norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1) + 1e-6)
        return tf.reduce_mean((norms - 1.0) ** 2)

    def train_step(self, real):
        noise = self.noise(real)

        def critic_loss():
            fake = self.generator(noise, training=True)
            gap = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
            return gap + 10.0 * self.penalty(real, fake)

        def generator_loss():
            return -tf.reduce_mean(self.critic(self.generator(noise)))

        for _ in range(2):
            first = self.update(self.critic, self.critic_optimizer, critic_loss)
        second = self.update(self.generator, self.generator_optimizer, generator_loss)
        return {"critic_loss": first, "generator_loss": second}


def _adversaries(env: Env, kind: type, rate: float) -> dict:
    def build():
        model = kind()
        model.compile(_sgd(rate), _sgd(rate))
        return model

    return _train(env, build, common.features(NUM_ROWS))


@case("A GAN: two optimizers, two trackers")
@registry.same_as("gan_with_two_optimizers")
def adversaries_with_two_optimizers(env: Env) -> dict:
    return _adversaries(env, Adversaries, 0.05)


@case("WGAN-GP: a penalty by an inner tape")
@registry.same_as("gan_with_two_optimizers")
def adversaries_with_a_gradient_penalty(env: Env) -> dict:
    return _adversaries(env, WithGradientPenalty, 0.005)


class Autoencoder(keras.Model):
    """A variational autoencoder with three trackers."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((common.NUM_FEATURES,)), layers.Dense(2 * LATENT)]
        )
        self.decoder = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(common.NUM_FEATURES, activation="sigmoid"),
            ]
        )
        names = ("total_loss", "reconstruction_loss", "divergence")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance = tf.split(self.encoder(data), 2, axis=1)
            noise = tf.sin(7.0 * data[:, :LATENT])
            decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise)
            wanted = tf.sigmoid(data)[..., tf.newaxis]
            entropy = losses.binary_crossentropy(wanted, decoded[..., tf.newaxis])
            reconstruction = tf.reduce_mean(tf.reduce_sum(entropy, axis=1))
            terms = 1 + log_variance - tf.square(mean) - tf.exp(log_variance)
            divergence = tf.reduce_mean(tf.reduce_sum(-0.5 * terms, axis=1))
            total = reconstruction + divergence
        _apply(self, tape, total)
        values = (total, reconstruction, divergence)
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        # The first by another name than its own.
        names = ("loss", "reconstruction_loss", "divergence")
        return {
            name: tracker.result()
            for name, tracker in zip(names, self.trackers, strict=True)
        }


@case("A VAE: reconstruction, divergence and their trackers")
@registry.same_as("compute_loss_overridden")
def variational_autoencoder(env: Env) -> dict:
    def build():
        model = Autoencoder()
        model.compile(optimizer=_sgd(0.01))
        return model

    return _train(env, build, common.features(NUM_ROWS))


class Endpoint(layers.Layer):
    """Computes the loss of its inputs, adds it and tracks the accuracy."""

    def __init__(self, **options):
        super().__init__(**options)
        self.loss_fn = losses.BinaryCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy.update_state(targets, logits, sample_weight)
        return tf.sigmoid(logits)


@case("An endpoint layer: `add_loss` of a loss object, no other loss")
@registry.same_as("add_loss")
def endpoint_layer(env: Env) -> dict:
    def build():
        x = keras.Input((common.NUM_FEATURES,), name="x")
        y = keras.Input((1,), name="y")
        weight = keras.Input((1,), name="weight")
        out = Endpoint()(layers.Dense(1)(x), y, weight)
        model = keras.Model({"x": x, "y": y, "weight": weight}, out)
        model.compile(optimizer=_sgd())
        return model

    x, y = _regression()
    weight = np.linspace(0.1, 2.0, NUM_ROWS)[:, np.newaxis].astype("float32")
    data = {"x": x, "y": (y > 0).astype("float32"), "weight": weight}
    return _train(env, build, data, evaluates=True)


class Added(layers.Layer):
    """Adds losses of three kinds.

    Args:
        kind: `"sum"` over the batch, `"mean"`, or `"weights"`, a penalty.
    """

    def __init__(self, kind, **options):
        super().__init__(**options)
        self.kind = kind
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, inputs):
        outputs = inputs * self.scale
        squares = ops.square(outputs)
        if self.kind == "sum":
            self.add_loss(0.01 * ops.sum(squares))
        elif self.kind == "mean":
            self.add_loss(0.3 * ops.mean(squares))
        else:
            self.add_loss(0.1 * ops.sum(ops.square(self.scale)))
        return outputs


def _added(env: Env, kind: str) -> dict:
    def build():
        inputs = keras.Input((common.NUM_FEATURES,))
        hidden = Added(kind)(layers.Dense(4, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        return common.compiled(model, _sgd())

    return _train(env, build, *_regression(), evaluates=True)


@case("`add_loss` of a sum over the batch")
@registry.same_as("add_loss")
def add_loss_of_a_sum(env: Env) -> dict:
    return _added(env, "sum")


@case("`add_loss` of a mean and of a penalty of weights")
@registry.same_as("add_loss")
def add_loss_of_a_mean_and_of_a_penalty(env: Env) -> dict:
    return {kind: _added(env, kind) for kind in ("mean", "weights")}


class Distilled(keras.Model):
    """A student that follows a teacher's soft labels and the hard ones."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.student_loss = losses.SparseCategoricalCrossentropy(from_logits=True)
        self.teacher_loss = losses.KLDivergence()

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        soft, alpha = 3.0, 0.2
        wanted = ops.softmax(self.teacher(x, training=False) / soft, axis=1)
        found = ops.softmax(y_pred / soft, axis=1)
        followed = self.teacher_loss(wanted, found) * soft**2
        return alpha * self.student_loss(y, y_pred) + (1 - alpha) * followed


class Linear(layers.Layer):
    """The layer of Keras's guide, whose initial weights depend on when it is built."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(
            shape=(shape[-1], self.units), initializer="random_normal"
        )

    def call(self, x: Any) -> Any:
        return ops.matmul(x, self.kernel)


class UnlikeItsCall(keras.Model):
    """A step that calls other layers than `call`, in another order.

    Its labels, too, are others than those of the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Linear(4), Linear(common.NUM_CLASSES)
        self.projection = Linear(2)

    def call(self, x: Any) -> Any:
        return ops.argmax(self.head(self.encoder(x)), axis=-1)[:, None]

    def train_step(self, data: tuple) -> dict:
        x, y, *_ = data
        y = tf.one_hot(tf.reshape(tf.cast(y, tf.int32), [-1]), common.NUM_CLASSES)
        with tf.GradientTape() as tape:
            encoded = self.encoder(x)
            projected = ops.mean(ops.square(self.projection(encoded)))
            y_pred = ops.softmax(self.head(encoded))
            loss = self.compute_loss(y=y, y_pred=y_pred) + projected
        _apply(self, tape, loss)
        return {**self.compute_metrics(x, y, y_pred), "total": loss}


@case("A step with other layers, labels and metrics than `call` would have")
def step_builds_what_it_uses(env: Env) -> dict:
    def build() -> keras.Model:
        model = UnlikeItsCall()
        loss = losses.CategoricalCrossentropy()
        return common.compiled(model, _sgd(), loss, metrics=["accuracy"])

    trained = _train(env, build, *_classification())
    model = common.build_in_scope(env, build)
    logs = model.train_on_batch(*_classification(), return_dict=True)
    return {**trained, "of a batch": logs, "after a batch": env.weights(model)}


@case("Knowledge distillation")
@registry.same_as("gan_with_two_optimizers")
def knowledge_distillation(env: Env) -> dict:
    def build():
        student, teacher = (common.mlp(units, outputs=3) for units in (2, 5))
        model = Distilled(student, teacher)
        teacher.trainable = False
        model.compile(optimizer=_sgd(0.02), metrics=["accuracy"])
        return model

    return _train(env, build, *_classification(), evaluates=True)


@case("A classifier on a frozen encoder that was trained before")
@registry.same_as("layers_frozen_between_fits_without_recompiling")
def classifier_on_a_frozen_encoder(env: Env) -> dict:
    """The second step of supervised contrastive learning."""

    def encoder():
        return common.compiled(common.mlp(outputs=common.NUM_FEATURES), _sgd())

    x, y = _classification()
    trained = common.build_in_scope(env, encoder)
    common.fit(trained, x, x)

    def build():
        trained.trainable = False
        inputs = keras.Input((common.NUM_FEATURES,))
        head = layers.Dense(common.NUM_CLASSES, activation="softmax")
        model = keras.Model(inputs, head(trained(inputs)))
        loss = losses.SparseCategoricalCrossentropy()
        return common.compiled(model, _sgd(), loss, metrics=["accuracy"])

    return _train(env, build, x, y, evaluates=True)


class InBatch(keras.Model):
    """Pairs of views: each row's other view is to be the most similar of all."""

    def __init__(self):
        super().__init__()
        self.encoder = common.mlp(outputs=LATENT)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def contrastive_loss(self, first, second):
        first, second = tfdp.all_gather(first), tfdp.all_gather(second)
        similarities = tf.matmul(first, second, transpose_b=True) / 0.5
        own = tf.range(tf.shape(first)[0])
        return tf.reduce_mean(
            losses.sparse_categorical_crossentropy(own, similarities, from_logits=True)
        )

    def step(self, data):
        views = (self.encoder(view, training=True) for view in data)
        return self.contrastive_loss(*(tf.math.l2_normalize(v, axis=1) for v in views))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.step(data)
        _apply(self, tape, loss)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self.step(data))
        return {"loss": self.tracker.result()}


class OwnRowsAgainstAll(InBatch):
    """Gathers one side: the rows of a replica against those of all."""

    def contrastive_loss(self, first, second):
        everybodys = tfdp.all_gather(second)
        matches = tf.reduce_sum(first * second, axis=1) / 0.5
        all_of_them = tf.matmul(first, everybodys, transpose_b=True) / 0.5
        return tf.reduce_mean(tf.reduce_logsumexp(all_of_them, axis=1) - matches)


def _in_batch(env: Env, kind: type) -> dict:
    def build():
        model = kind()
        model.compile(optimizer=_sgd())
        return model

    x = common.features(NUM_ROWS)
    model = common.build_in_scope(env, build)
    pairs = common.batched(x, np.roll(x, 1, axis=1))
    history = common.fit(model, pairs, epochs=2)
    evaluated = model.evaluate(pairs, verbose=0)
    return {
        "history": history,
        "weights": env.weights(model),
        "evaluate": evaluated,
    }


@case("`tfdp.all_gather`: a contrastive loss of the global batch")
@registry.same_as("losses_that_couple_rows")
def contrastive_loss_of_gathered_rows(env: Env) -> dict:
    return _in_batch(env, InBatch)


@case("`tfdp.all_gather`: own rows against all")
@registry.same_as("losses_that_couple_rows")
def contrastive_loss_of_own_rows(env: Env) -> dict:
    return _in_batch(env, OwnRowsAgainstAll)


class Captions(keras.Model):
    """A mean over the words that a mask leaves, divided by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            mask = tf.cast(tf.not_equal(y, 0), tf.float32)
            loss_fn = losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="none"
            )
            per_word = loss_fn(y, self(x, training=True)) * mask
            loss = tf.reduce_sum(per_word) / tf.reduce_sum(mask)
        _apply(self, tape, loss)
        return {"loss": loss}


class OneUpdateForEachTarget(keras.Model):
    """Two updates in a step, each with a loss that checks shapes as the graph runs.

    TensorFlow runs such checks in the order in which they are traced.
    """

    def train_step(self, data):
        x, y = data
        total = 0.0
        for targets in (y, tf.roll(y, 1, axis=1)):
            with tf.GradientTape() as tape:
                per_word = losses.sparse_categorical_crossentropy(
                    targets, self(x, training=True), from_logits=True
                )
                loss = tf.reduce_mean(per_word)
            _apply(self, tape, loss)
            total += loss
        return {"loss": total}


def _tokens_model(kind: type) -> Callable[[], keras.Model]:
    def build():
        ids = keras.Input((common.LENGTH,), dtype="int32")
        embedded = layers.Embedding(common.NUM_TOKENS, 4)(ids)
        model = kind(ids, layers.Dense(common.NUM_TOKENS)(embedded))
        model.compile(optimizer=_sgd())
        return model

    return build


@case("Two updates in a step, with checks that wait for the first")
@registry.same_as("gan_with_two_optimizers")
def step_with_two_updates_and_checks(env: Env) -> dict:
    x = common.tokens(NUM_ROWS)
    return _train(env, _tokens_model(OneUpdateForEachTarget), x, x)


@case("A masked mean by hand, with other numbers of words in each share")
@registry.same_as("losses_that_couple_rows")
def masked_mean_by_hand(env: Env) -> dict:
    x = common.tokens(NUM_ROWS)
    x[:, 0] = np.maximum(x[:, 0], 1)
    x[::2, 2:] = 0
    return _train(env, _tokens_model(Captions), x, x)


class FunctionsOfSums(OwnLoss):
    """What is no mean over rows, but computed from means and sums over them."""

    def own_loss(self, y, y_pred):
        root = tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))
        overlap = 2.0 * tf.reduce_sum(y * y_pred) + 1.0
        dice = 1.0 - overlap / (tf.reduce_sum(y * y) + tf.reduce_sum(y_pred**2) + 1.0)
        rows = tf.cast(tf.shape(y)[0], tf.float32)
        covariance = tf.matmul(y, y_pred, transpose_a=True) / rows
        return root + 0.5 * dice + 0.1 * tf.reduce_sum(tf.square(covariance))

    def test_step(self, data):
        x, y = data
        return {"loss": self.own_loss(y, self(x, training=False))}


@case("A root of a mean, a quotient of sums, a cross-correlation")
@registry.same_as("losses_that_couple_rows")
def loss_that_is_a_function_of_sums(env: Env) -> dict:
    return _train(env, _compiled(FunctionsOfSums), *_regression())


@case("The same in a `test_step`")
@registry.same_as("losses_that_couple_rows")
def evaluation_of_a_function_of_sums(env: Env) -> dict:
    return _train(env, _compiled(FunctionsOfSums), *_regression(), evaluates=True)
