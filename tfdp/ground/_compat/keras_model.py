"""Keras models: strategy, symbolic build, epochs, optimizer shown."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import symbolic_scope

from tfdp.ground._compat.owners import TensorFlowTrainer
from tfdp.ground.forks import TemporaryDirectory

OWN_STEPS = ("train_step", "test_step")


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was made, or `None`."""
    return getattr(model, "_distribute_strategy", None)


def overridden(model: Any, names: tuple[str, ...] = OWN_STEPS) -> list[str]:
    """Names of Keras's functions that a model, or its class, overrides."""
    return [
        name
        for name in names
        if getattr(getattr(model, name), "__func__", None)
        is not getattr(TensorFlowTrainer, name)
    ]


def is_built_symbolically() -> bool:
    """Whether Keras only asks for shapes, as when it builds a model from a batch."""
    return symbolic_scope.in_symbolic_scope()


def build_symbolically(model: Any, data_batch: Any) -> None:
    """Build model, metrics and optimizer from the shapes of a batch, for a loop."""
    metrics = model._compile_metrics
    is_new = metrics is not None and not metrics.built
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=data_batch)
    if is_new:
        _keep_first_state(metrics)


def _keep_first_state(metrics: Any) -> None:
    """Leave out the first reset, which metrics of one device are built after."""

    def reset_state() -> None:
        del metrics.__dict__["reset_state"]

    metrics.__dict__["reset_state"] = reset_state


def build_eagerly(model: Any, data_batch: Any) -> None:
    """Build a model that runs eagerly, and whose Python asks for values of tensors."""
    batch = keras.tree.map_structure(_ones_like, data_batch)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss, metrics = model._compile_loss, model._compile_metrics
    with model.distribute_strategy.scope():
        y_pred = model(x)
        if loss is not None and not loss.built:
            loss.build(y, y_pred)
        if metrics is not None and not metrics.built:
            # The states that a metric makes when it is updated first.
            with contextlib.suppress(Exception):
                keras_backend.compute_output_spec(
                    model.compute_metrics, x, y, y_pred, sample_weight=sample_weight
                )
            if not metrics.built:
                metrics.build(y, y_pred)
    build_symbolically(model, data_batch)


def _ones_like(spec: Any) -> tf.Tensor:
    shape = [1 if size is None else size for size in spec.shape]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.ones(shape, spec.dtype)


def build_by_steps(
    model: Any, data_batch: Any, steps: tuple[str, ...] | None = None
) -> None:
    """Build the layers that steps call, where any is unbuilt.

    Else replicas would build them while the step is traced, each in its thread, and
    TensorFlow would initialize them in a branch of the step.

    Args:
        model: Keras model.
        data_batch: Nest of specs, or arrays, of a batch.
        steps: Tuple of strings, names of the steps. Defaults to those that the user
            overrides, with their layers.
    """
    layers = layers_of(model) if steps is None else [model, *layers_of(model)]
    if all(layer.built for layer in layers):
        return
    batch = keras.tree.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), data_batch
    )
    # An optimizer has no replica to update here, and its error is no news; the
    # variables that were asked for so far are made at the end all the same.
    for name in overridden(model) if steps is None else steps:
        with model.distribute_strategy.scope(), contextlib.suppress(Exception):
            keras_backend.compute_output_spec(getattr(model, name), batch)


def layers_of(model: Any) -> list:
    """All layers of a model, those inside of others too."""
    return model._flatten_layers(include_self=False)


def calls_of(model: Any) -> list[tuple[str, list[str]]]:
    """Name and names of the feeding operations of each call in a functional model."""
    by_depth = getattr(model, "_nodes_by_depth", {})
    return [
        (node.operation.name, [parent.operation.name for parent in node.parent_nodes])
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
    ]


def has_default_config(layer: Any) -> bool:
    """Whether a layer's class does not say itself what its config is."""
    return getattr(layer.get_config, "_is_default", False)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Losses and metrics as they were given to `compile`."""
    given = getattr(getattr(model, "_compile_config", None), "config", {})
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {name: given.get(name) for name in names}


def function_arguments(thing: Any) -> dict[str, Any]:
    """Arguments of the function behind a loss or metric; not all configs hold them."""
    return getattr(thing, "_fn_kwargs", {})


def is_within_fit(arguments: dict[str, Any]) -> bool:
    """Whether `fit` itself validates by an `evaluate` with these arguments."""
    return bool(arguments.get("kwargs", {}).get("_use_cached_eval_dataset"))


def initial_epoch(model: Any) -> int:
    """The epoch at which a restored model goes on, see BackupAndRestore."""
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Set what `initial_epoch` reads."""
    model._initial_epoch = epoch


@contextlib.contextmanager
def replaced_optimizer(model: Any, optimizer: Any) -> Iterator[None]:
    """Show another optimizer as the model's, and in its compile arguments."""
    own = model.optimizer
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    compiled_with = config.get("optimizer")
    model.__dict__["optimizer"] = optimizer
    config["optimizer"] = optimizer
    try:
        yield
    finally:
        model.__dict__["optimizer"] = own
        config["optimizer"] = compiled_with


def backup_that_writes_nothing(callback: Any, folder: TemporaryDirectory) -> Any:
    """A `BackupAndRestore` that saves and loads the same weights, but no other file.

    What it notes beside the weights goes to a temporary directory.
    """
    twin = object.__new__(type(callback))
    vars(twin).update(vars(callback))
    path = os.path.join(folder.name, "training_metadata.json")
    vars(twin).update(
        # It looks whether the directory is there, and makes it if the first worker
        # has not yet: one of the two would fail.
        backup_dir=folder.name,
        _training_metadata_path=path,
        _prev_training_metadata_path=f"{path}.bkp",
        double_checkpoint=False,
        delete_checkpoint=False,
        _tfdp_folder=folder,  # lives as long as the callback
    )
    return twin


def weights_of_layers(model: Any) -> list:
    """What the layers of a model were given to train, frozen or not, each once.

    In the order of the layers. Keras's lists of weights sort out what is frozen.
    """
    found = [
        variable
        for layer in model._flatten_layers(include_self=True, recursive=True)
        for variable in getattr(layer, "_trainable_variables", ())
    ]
    return list({id(variable): variable for variable in found}.values())
