"""Saving and loading with the user's own optimizer, so that plain Keras opens files.

Keras saves and loads a `DistributedOptimizer` through a view of the optimizer that it
wraps, the plain optimizer, see `tfdp.training.keras_hooks.file_view`. The functions
here replace functions of Keras, and receive the replaced function as `original`, before
its own arguments; the table is in `tfdp.training.keras_hooks.install`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.coordination.join import num_joined_workers
from tfdp.ground._compat import (
    keras_model,
    keras_optimizer,
    optimizer_state,
    tf_distribute,
)
from tfdp.ground.base.context import num_replicas_of, strategy_of
from tfdp.ground.base.wrappers import is_sharded
from tfdp.training.keras_hooks.file_view import loss_scaling_of, sharded_tensors
from tfdp.training.keras_hooks.saving import (
    is_saving,
    save_atomically,
    save_checkpoint_atomically,
)
from tfdp.training.parameters.host_gathers import (
    parameters_of,
    reading_alone,
    serve_reads,
)
from tfdp.training.replicas.synchronized_scope import local_variables
from tfdp.training.sharding.full_state import FullState, gather_full_state


def save_file(
    original: Callable, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save a model to a file atomically, with a Keras optimizer that Keras can load.

    That is the optimizer that the `DistributedOptimizer` wraps. `original` is a
    function of Keras, such as `save_model`, called with all other arguments.

    Returns:
        Result of `original`.
    """

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        """Return the result of `original` on the model with the wrapped optimizer."""
        return _save_with_plain_optimizer(original, *args, **kwargs)

    strategy = strategy_of(model)
    if strategy is None or is_saving():
        return save(model, filepath, *args, **kwargs)
    # Only the replacement of `model.save` is atomic, and `keras.saving.save_model` does
    # not call it. So a save by `keras.saving.save_model` is made atomic here.
    with local_variables(strategy):
        return save_atomically(save, model, filepath, *args, **kwargs)


def _save_with_plain_optimizer(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Save by Keras's function `original`, with the optimizer inside tfdp's wrapper.

    With sharded state all workers take part, and worker 0 writes.

    Returns:
        Result of `original`; with sharded state, `None` on other workers than 0.

    Raises:
        OSError: With sharded state, on all workers but 0, if worker 0 could not save.
            Worker 0 raises its own error.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    has_shards = is_sharded(optimizer)
    parameters = parameters_of(model)
    if not has_shards and not parameters:
        with plain_optimizer(model):
            return original(model, *args, **kwargs)
    strategy = keras_optimizer.strategy_of_optimizer(optimizer) if has_shards else None
    extended = (strategy or strategy_of(model)).extended
    worker_group, host_group = extended.worker_group, extended.host_group
    worker_group.all_gather(
        "saving a sharded model, in which all workers must take part"
    )
    is_writer = worker_group.is_chief
    full_state = None
    if has_shards:
        tensors = sharded_tensors(optimizer)
        full_state = gather_full_state(tensors, host_group, keep=is_writer)
    result, error = None, None
    if not is_writer:
        serve_reads(parameters, host_group)
    else:
        try:
            with (
                reading_alone(parameters, host_group),
                plain_optimizer(model, full_state),
            ):
                result = original(model, *args, **kwargs)
        except Exception as caught:  # noqa: BLE001 the other workers wait for the result
            error = caught
    failure = "" if error is None else str(error)
    failure_of_writer = worker_group.all_gather("a saved file", failure)[0]
    if error is not None:
        raise error
    if failure_of_writer:
        raise OSError(f"Worker 0 could not save the model: {failure_of_writer}")
    return result


def save_tensors(
    original: Callable, saver: Any, file_prefix: Any, options: Any = None
) -> Any:
    """Write a TensorFlow checkpoint, atomically if there are several workers.

    `original` is the method `save` of the `saver`, called with the other arguments.

    Returns:
        Result of the method.
    """
    if num_joined_workers() == 1 or not tf.executing_eagerly():
        return original(saver, file_prefix, options)
    prefix = tf.compat.as_str(tf.convert_to_tensor(file_prefix).numpy())
    return save_checkpoint_atomically(
        lambda own: original(saver, tf.constant(own), options), prefix
    )


def load_with_plain_optimizer(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load by Keras's function `original` into the optimizer inside tfdp's wrapper.

    Returns:
        Result of `original`.

    Raises:
        ValueError: With sharded state, if only some workers see the file.
    """
    if is_sharded(getattr(model, "optimizer", None)):
        _check_file_on_all_workers(
            model.optimizer, args[0] if args else kwargs.get("filepath")
        )
    with local_variables(strategy_of(model)), plain_optimizer(model):
        return original(model, *args, **kwargs)


def _check_file_on_all_workers(optimizer: Any, path: Any) -> None:
    """Raise a `ValueError` if only some workers see a file to load shards from."""
    strategy = keras_optimizer.strategy_of_optimizer(optimizer)
    exists = os.path.exists(path) if isinstance(path, (str, os.PathLike)) else True
    topic = (
        "loading a file into a sharded optimizer, in which all workers must take part"
    )
    seen_by = strategy.extended.worker_group.all_gather(topic, exists)
    if any(seen_by) and not all(seen_by):
        raise ValueError(
            "Every worker has to see the file that is loaded into a sharded optimizer. "
            f"Put it where worker {seen_by.index(False)} finds it too. Received: {path}"
        )


@contextlib.contextmanager
def plain_optimizer(model: Any, full_state: FullState | None = None) -> Iterator[None]:
    """Open a context in which the model has a Keras view of its `DistributedOptimizer`.

    Any other optimizer stays in place.

    Args:
        model: Keras model.
        full_state: `FullState`, the gathered values of sharded state, to save them; or
            `None`. Defaults to `None`.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "as_keras"):
        yield
        return
    with keras_model.replaced_optimizer(model, optimizer.as_keras(full_state)):
        yield


def save_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Save an optimizer's variables to `store`, Keras's dict-like store in a file.

    Gradients that each replica accumulates are saved as their sum over replicas. If
    there are none, Keras's method `original` saves.
    """
    sums = _accumulators_of_replicas(optimizer)
    if not sums:
        original(optimizer, store)
        return
    replicas = num_replicas_of(optimizer)
    for index, variable in enumerate(optimizer.variables):
        is_sum = any(variable is item for item in sums)
        value = (
            tf_distribute.sum_of_local_parts(variable, replicas)
            if is_sum
            else variable.numpy()
        )
        store[str(index)] = value


def load_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Load an optimizer's variables from `store`, Keras's dict-like store in a file.

    Keras's method `original` loads them. Then each of N replicas gets an N-th of a
    loaded sum of accumulated gradients.
    """
    original(optimizer, store)
    for variable in _accumulators_of_replicas(optimizer):
        variable.assign(variable.numpy() / num_replicas_of(optimizer))


def _accumulators_of_replicas(optimizer: Any) -> list:
    """Return the variables in which each replica accumulates its gradients.

    Their values differ between replicas: the accumulated gradient is the sum of all.

    Args:
        optimizer: Keras optimizer.

    Returns:
        List of Keras variables; empty without accumulation, or with one replica, whose
        values are the sum already.
    """
    is_sum = num_replicas_of(optimizer) == 1
    return [] if is_sum else optimizer_state.accumulators(optimizer)


def unwrap_loss_scaling(model: Any) -> None:
    """Remove the `LossScaleOptimizer` that `compile` adds for float16.

    The `DistributedOptimizer` inside receives the scaler's settings, unless it has loss
    scaling already.
    """
    outer = model.optimizer
    is_scaled = isinstance(outer, keras.optimizers.LossScaleOptimizer)
    inner: Any = getattr(outer, "inner_optimizer", None)
    if is_scaled and hasattr(inner, "as_keras"):
        if inner.features.scaling is None:
            inner.features.set_scaling(loss_scaling_of(outer))
        model.optimizer = inner
