"""Worker of a training benchmark: timed steps of `fit` and of GradientTape loops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.cluster import Cluster
from tfdp.ground.options import CommunicationOptions
from tfdp.launch.bench.channel import OnDemand, Variant, Variants, timed, work
from tfdp.launch.bench.fit import build, fit_variant, make_batch
from tfdp.launch.bench.models import Model
from tfdp.training.strategy.strategy import MultiWorkerMirroredStrategy, auto_strategy

_LEARNING_RATE = 1e-3


def make_strategy(setup: dict[str, Any]) -> Any:
    """Create the strategy of a worker; must precede any other use of TensorFlow.

    It also sets TensorFlow's number of threads and, for several workers or devices,
    `TF_CONFIG`.

    Args:
        setup: Dict, the worker's setup: its `rank`, all `addresses`, the `strategy`
            (`"tfdp"` or `"stock"` for the `MultiWorkerMirroredStrategy` of tfdp or of
            TensorFlow, `"auto"` for `auto_strategy`, or `"alone"` for workers that do
            not communicate), the number of `devices` of each worker if it is above one,
            `threads`, and the options of `communication`.

    Returns:
        A strategy, or `None` for `"alone"`.
    """
    name, devices = setup["strategy"], setup.get("devices")
    if name != "alone" and (len(setup["addresses"]) > 1 or devices):
        cluster = Cluster(
            tuple(setup["addresses"]),
            task_index=setup["rank"],
            devices_per_worker=devices,
        )
        os.environ["TF_CONFIG"] = cluster.to_tf_config()
    threads = setup.get("threads", None if name == "auto" else 1)
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    options = CommunicationOptions(**setup.get("communication", {}))
    if name == "alone":
        return None
    if name == "auto":
        return auto_strategy(communication=options)
    if name == "tfdp":
        return MultiWorkerMirroredStrategy(communication=options)
    return tf.distribute.MultiWorkerMirroredStrategy()


def training_step(
    strategy: Any,
    model: Model,
    *,
    make_optimizer: Callable[[], Any] | None = None,
    batch_size: int = 32,
    pack_bytes: int = 0,
    init: str | None = None,
) -> Callable[[], Any]:
    """Build a model, and return a traced step of a GradientTape loop on a fixed batch.

    Args:
        strategy: Strategy of the model, or `None`.
        model: `Model`, the shape to build.
        make_optimizer: Callable that returns a Keras optimizer. Defaults to SGD.
        batch_size: Int, number of samples of each replica. Defaults to `32`.
        pack_bytes: Int, size of the packs in which the stock strategy reduces
            gradients, or `0` to reduce and apply them by the optimizer. Above 0, plain
            SGD replaces the optimizer, which has no option for the size. Defaults to
            `0`.
        init: String, argument `init` of the `scope` of a tfdp strategy, or `None` for
            its default. Defaults to `None`.

    Returns:
        Callable that takes the step and returns the loss.

    Example:

    >>> step = training_step(None, Model("mlp", 8))
    >>> bool(step() > step())
    True
    """
    keras.utils.set_random_seed(0)
    scope_options = {} if init is None else {"init": init}
    with strategy.scope(**scope_options) if strategy else contextlib.nullcontext():
        network = build(model)
        optimizer = (
            make_optimizer() if make_optimizer else keras.optimizers.SGD(_LEARNING_RATE)
        )
        optimizer.build(network.trainable_variables)
    batch = tuple(tf.constant(array) for array in make_batch(model, batch_size))
    num_replicas = strategy.num_replicas_in_sync if strategy else 1

    def replica() -> Any:
        """Update the model by the gradients of a replica's batch; return the loss."""
        loss, gradients = _loss_and_gradients(network, batch, batch_size * num_replicas)
        if pack_bytes:
            apply_in_packs(gradients, network.trainable_variables, pack_bytes)
        else:
            optimizer.apply(gradients, network.trainable_variables)
        return loss

    @tf.function
    def step() -> Any:
        """Take the step on all local replicas, and return the loss of the first."""
        if strategy is None:
            return replica()
        return strategy.experimental_local_results(strategy.run(replica))[0]

    return step


def _loss_and_gradients(
    network: Any, batch: tuple[Any, ...], global_batch_size: int
) -> tuple[Any, list[Any]]:
    """Return the loss of a replica's batch, and the gradients of trainable variables.

    The sum of the loss over replicas is the mean loss of the global batch.

    Args:
        network: `keras.Model`.
        batch: Tuple of the inputs and the labels of the replica.
        global_batch_size: Int, number of samples of all replicas.
    """
    x, y = batch
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(
            y, network(x, training=True), from_logits=True
        )
        loss = tf.reduce_sum(losses) / (global_batch_size * losses.shape[-1])
    return loss, tape.gradient(loss, network.trainable_variables)


def sums_in_packs(tensors: list[Any], pack_bytes: int) -> list[Any]:
    """Sum tensors over all replicas by the public API of tf.distribute.

    Args:
        tensors: List of tensors of the calling replica.
        pack_bytes: Int, `bytes_per_pack` of tf.distribute's `CommunicationOptions`, the
            size of the packs of tensors that it reduces together; `0` for its default.

    Returns:
        List of tensors, the sums over replicas.
    """
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=pack_bytes)
    context = tf.distribute.get_replica_context()
    return context.all_reduce("SUM", tensors, options)


def apply_in_packs(gradients: list[Any], variables: list[Any], pack_bytes: int) -> None:
    """All-reduce gradients in packs, and apply their sums by plain SGD.

    Args:
        gradients: List of tensors of the calling replica.
        variables: List of Keras variables.
        pack_bytes: Int, size of the packs, as for `sums_in_packs`.

    Example:

    >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = keras.Variable([1.0])
    >>> step = lambda: apply_in_packs([tf.constant([100.0])], [weight], 2**20)
    >>> unused_result = strategy.run(step)
    >>> round(float(weight.numpy()[0]), 4)
    0.8
    """

    def subtract(variable: Any, gradient: Any) -> None:
        """Subtract the learning rate times the gradient from a variable."""
        if isinstance(gradient, tf.IndexedSlices):
            steps = tf.IndexedSlices(_LEARNING_RATE * gradient.values, gradient.indices)
            variable.scatter_sub(steps)
        else:
            variable.assign_sub(_LEARNING_RATE * gradient)

    def update(strategy: Any, sums: list[Any]) -> None:
        """Apply the summed gradients to all variables, in cross-replica context."""
        for variable, total in zip(variables, sums, strict=True):
            strategy.extended.update(variable.value, subtract, args=(total,))

    sums = sums_in_packs(gradients, pack_bytes)
    tf.distribute.get_replica_context().merge_call(update, args=(sums,))


def make_variants(setup: dict[str, Any]) -> Variants:
    """Create the strategy and the measured variants of this worker from its setup.

    Args:
        setup: Dict for `make_strategy`, which also has `variants`: the settings of each
            variant by name.
    """
    strategy = make_strategy(setup)
    variant_settings = setup["variants"]

    def make(name: str) -> Variant:
        """Build the model of a named variant, and return a `Variant` that times it."""
        variant = dict(variant_settings[name])
        variant_strategy = None if variant.pop("alone", False) else strategy
        model = Model(**variant.pop("model"))
        if variant.pop("fit", False):
            return fit_variant(variant_strategy, model, **variant)
        return timed(training_step(variant_strategy, model, **variant))

    return OnDemand(make, lambda name: str(variant_settings[name]["model"]))


if __name__ == "__main__":
    work(make_variants)
