"""Keras models: strategy, symbolic build, epochs, temporary optimizer, callbacks."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state, symbolic_scope

from tfdp.ground._compat.owners import TensorFlowTrainer
from tfdp.ground._compat.tf_distribute import active_local_replica_id
from tfdp.ground.forks import TemporaryDirectory

# A user's model defines custom steps by overriding these methods of Keras, so
# `overridden` looks for them by default.
STEP_METHODS = ("train_step", "test_step")
# Keras's callbacks have no method that returns their state, so this table lists the
# attributes that training changes, by callback class. Checked on Keras 3.12 to 3.15.
CALLBACK_STATE: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        *("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    keras.callbacks.ReduceLROnPlateau: ("best", "wait", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
# These attributes of `CALLBACK_STATE` are `None` before the first epoch or batch, so
# `None` is valid for them in a backup, and for no others.
STATE_NONE_AT_FIRST = ("best", "_last_batch_seen")


def strategy_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was created, or `None`."""
    return getattr(model, "_distribute_strategy", None)


def in_state_of_caller(function: Callable) -> Callable:
    """Wrap a function that replicas run, to give it the Keras state of this thread.

    Keras keeps its state by thread: the dtype policy, custom objects, names, and the
    generator for draws without a seed. Each replica runs in a separate thread, which
    begins with a copy of the state of the thread that wraps the function. At the end,
    that thread gets the state of the first replica.

    Args:
        function: Callable, run in a replica's thread.
    """
    # Keras keeps the state of a thread as attributes of this private object, and has no
    # public way to copy it. Checked on Keras 3.12 to 3.15.
    state = vars(global_state.GLOBAL_STATE_TRACKER)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the function with a copy of the wrapping thread's Keras state.

        Returns:
            Result of the function.
        """
        own = vars(global_state.GLOBAL_STATE_TRACKER)
        for name, value in state.items():
            is_container = isinstance(value, (dict, list))
            own[name] = copy.copy(value) if is_container else value
        try:
            return function(*args, **kwargs)
        finally:
            if active_local_replica_id() == 0:
                state.update(own)

    return run


def overridden(model: Any, names: tuple[str, ...] = STEP_METHODS) -> list[str]:
    """Return those of Keras's methods `names` that a model or its class overrides."""
    return [
        name
        for name in names
        if getattr(getattr(model, name), "__func__", None)
        is not getattr(TensorFlowTrainer, name)
    ]


def is_built_symbolically() -> bool:
    """Return whether a symbolic call is running, in which Keras only infers shapes."""
    return symbolic_scope.in_symbolic_scope()


def build_symbolically(model: Any, data_batch: Any, step: str = "train_step") -> None:
    """Build a model, its metrics and optimizer from the nest of a batch's specs.

    If the user overrides the step, the step comes first, as on one device: it may call
    layers in another order than `call`, or other ones, and pass other labels to the
    metrics. `call` builds the rest, which a resumed run needs before its first step.

    Args:
        model: Keras model.
        data_batch: Nest of specs, or arrays, of a batch.
        step: String, the method of the model that will run. Defaults to `"train_step"`.
    """
    metrics = model._compile_metrics
    is_new = metrics is not None and not metrics.built
    parts = [*layers_of(model), model._compile_loss, metrics]
    if overridden(model, (step,)) and not all(p is None or p.built for p in parts):
        _trace_step(model, data_batch, step)
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=data_batch)
    if is_new:
        _skip_next_reset(metrics)


def _skip_next_reset(metrics: Any) -> None:
    """Make the next `reset_state` of metrics do nothing.

    On one device, Keras builds the metrics only after that call, so it resets nothing.
    """

    def reset_state() -> None:
        """Leave the metrics as they are, and restore Keras's method."""
        del metrics.__dict__["reset_state"]

    metrics.__dict__["reset_state"] = reset_state


def build_eagerly(model: Any, data_batch: Any) -> None:
    """Build a model, its loss and its metrics by an eager call on tensors of ones.

    It is for models whose Python code needs the values of tensors.

    Args:
        model: Keras model.
        data_batch: Nest of specs of a batch, the shapes and dtypes of these tensors.
    """
    batch = keras.tree.map_structure(_ones_like, data_batch)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss, metrics = model._compile_loss, model._compile_metrics
    with model.distribute_strategy.scope():
        y_pred = model(x)
        if loss is not None and not loss.built:
            loss.build(y, y_pred)
        if metrics is not None and not metrics.built:
            # A metric may create its states only in its first update. So an update is
            # traced here, and its errors are ignored, since only the created states
            # matter.
            with contextlib.suppress(Exception):
                keras_backend.compute_output_spec(
                    model.compute_metrics, x, y, y_pred, sample_weight=sample_weight
                )
            if not metrics.built:
                metrics.build(y, y_pred)
    build_symbolically(model, data_batch)


def _ones_like(spec: Any) -> tf.Tensor:
    """Return ones, or empty strings, of the shape of a spec; unknown sizes are 1."""
    shape = [1 if size is None else size for size in spec.shape]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.ones(shape, spec.dtype)


def build_by_steps(
    model: Any, data_batch: Any, steps: tuple[str, ...] | None = None
) -> None:
    """Build a model's layers by symbolic calls of its steps, if any is not built.

    Otherwise each replica's thread would build them while the step is traced, and
    TensorFlow would initialize their variables in a branch of the step.

    Args:
        model: Keras model.
        data_batch: Nest of specs, or arrays, of a batch.
        steps: Tuple of strings, names of the model's step methods, or `None` for the
            steps that the user overrides. Defaults to `None`.
    """
    layers = layers_of(model) if steps is None else [model, *layers_of(model)]
    if all(layer.built for layer in layers):
        return
    for name in overridden(model) if steps is None else steps:
        _trace_step(model, data_batch, name)


def _trace_step(model: Any, data_batch: Any, name: str) -> None:
    """Build layers, losses and metrics by a symbolic call of the step method `name`.

    It is called with symbolic tensors of the shapes in `data_batch`. Gradients are
    zeros, and optimizers do nothing. An error of the step is ignored; the layers that
    it called before the error are built.
    """

    def symbol(spec: Any) -> Any:
        """Return a `keras.KerasTensor` with the shape and dtype of a spec or array."""
        return keras.KerasTensor(spec.shape, spec.dtype.name)

    batch = keras.tree.map_structure(
        lambda spec: None if spec is None else symbol(spec), data_batch
    )
    with model.distribute_strategy.scope(), contextlib.suppress(Exception):
        keras_backend.compute_output_spec(getattr(model, name), batch)


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of a model's metrics, each of them once.

    `model.metrics` may list a metric twice, as the sum of `super().metrics` and of
    attributes, which Keras has added to them already.
    """
    found = {id(v): v for metric in model.metrics for v in metric.variables}
    return list(found.values())


def layers_of(model: Any) -> list:
    """Return a list of all layers inside a model, at any depth."""
    return model._flatten_layers(include_self=False)


def calls_of(model: Any) -> list[tuple[str, list[str]]]:
    """Return pairs for a functional model's calls: names of layer and input layers."""
    by_depth = getattr(model, "_nodes_by_depth", {})
    return [
        (node.operation.name, [parent.operation.name for parent in node.parent_nodes])
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
    ]


def has_default_config(layer: Any) -> bool:
    """Return whether a layer's class does not implement `get_config`."""
    return getattr(layer.get_config, "_is_default", False)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments of a model's `compile` about losses and metrics, by name.

    These are `loss`, `loss_weights`, `metrics` and `weighted_metrics`; `None` for one
    that was not passed.
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    names = ("loss", "loss_weights", "metrics", "weighted_metrics")
    return {name: config.get(name) for name in names}


def function_arguments(loss_or_metric: Any) -> dict[str, Any]:
    """Return the keyword arguments of the function that a loss or metric wraps."""
    return getattr(loss_or_metric, "_fn_kwargs", {})


def is_within_fit(arguments: dict[str, Any]) -> bool:
    """Return whether an `evaluate` with these arguments is the validation of `fit`.

    Args:
        arguments: Dict from the name of a parameter of `evaluate` to its argument.
    """
    return bool(arguments.get("kwargs", {}).get("_use_cached_eval_dataset"))


def initial_epoch(model: Any) -> int:
    """Return the epoch at which a model's next `fit` begins, or 0 if none is set."""
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Set the epoch at which a model's `fit` begins, instead of its `initial_epoch`.

    With 0, the argument `initial_epoch` of `fit` counts again.
    """
    model._initial_epoch = epoch


@contextlib.contextmanager
def replaced_optimizer(model: Any, optimizer: Any) -> Iterator[None]:
    """Replace a model's optimizer, and that of its compile arguments, in the block."""
    original = model.optimizer
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    compiled_with = config.get("optimizer")
    model.__dict__["optimizer"] = optimizer
    config["optimizer"] = optimizer
    try:
        yield
    finally:
        model.__dict__["optimizer"] = original
        config["optimizer"] = compiled_with


def backup_without_files(callback: Any, folder: TemporaryDirectory) -> Any:
    """Return a copy of a `BackupAndRestore` callback that writes metadata to `folder`.

    It is for a worker that takes part in the saves of worker 0. It deletes no backups,
    and keeps `folder` from being deleted. Weights have the path of `callback`.
    """
    twin = object.__new__(type(callback))
    vars(twin).update(vars(callback))
    path = os.path.join(folder.name, "training_metadata.json")
    vars(twin).update(
        # Keras's callback creates its backup directory if it does not exist. Two
        # workers that create the same directory would collide, so each copy has a
        # directory of its own.
        backup_dir=folder.name,
        _training_metadata_path=path,
        _prev_training_metadata_path=f"{path}.bkp",
        double_checkpoint=False,
        delete_checkpoint=False,
        _tfdp_folder=folder,  # this reference keeps the folder from being deleted
    )
    return twin


def weights_of_layers(model: Any) -> list:
    """Return a list of all weights that layers of a model created as trainable.

    Weights of frozen layers are included, unlike in `model.trainable_weights`. Each
    weight is listed once.
    """
    variables = [
        variable
        for layer in model._flatten_layers(include_self=True, recursive=True)
        for variable in getattr(layer, "_trainable_variables", ())
    ]
    return list({id(variable): variable for variable in variables}.values())
