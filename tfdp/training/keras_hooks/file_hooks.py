"""Keras's saving and loading with the user's own optimizer, so that Keras opens it.

A `DistributedOptimizer` shows itself to Keras's saving and loading as the optimizer
that it wraps, see `tfdp.training.keras_hooks.file_view`. The functions that save and
load here take the place of Keras's, see `tfdp.training.keras_hooks.install`. What is
loaded goes back the same way.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdp.ground import _compat
from tfdp.ground.base.context import num_replicas_of, strategy_of
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
    """Call a function of Keras that saves: atomically, with the plain optimizer."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        return _save_with_plain_optimizer(original, *args, **kwargs)

    strategy = strategy_of(model)
    if strategy is None or is_saving():
        return save(model, filepath, *args, **kwargs)
    # `keras.saving.save_model` comes here without a method of the model.
    with local_variables(strategy):
        return save_atomically(strategy, save, model, filepath, *args, **kwargs)


def _save_with_plain_optimizer(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function of Keras that saves with the plain optimizer.

    Where state is sharded all workers take part, and the first one writes.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    is_sharded = getattr(optimizer, "is_sharded", False)
    parameters = parameters_of(model)
    if not is_sharded and not parameters:
        with plain_optimizer(model):
            return original(model, *args, **kwargs)
    strategy = _compat.strategy_of_optimizer(optimizer) if is_sharded else None
    extended = (strategy or strategy_of(model)).extended
    worker_group, host_group = extended.worker_group, extended.host_group
    worker_group.all_gather(
        "saving a model of which each worker has a part, which all workers have to do"
    )
    is_writer = worker_group.is_chief
    whole = None
    if is_sharded:
        tensors = sharded_tensors(optimizer)
        whole = gather_full_state(tensors, host_group, keep=is_writer)
    result, error = None, None
    if not is_writer:
        serve_reads(parameters, host_group)
    else:
        try:
            with reading_alone(parameters, host_group), plain_optimizer(model, whole):
                result = original(model, *args, **kwargs)
        except Exception as caught:  # noqa: BLE001 the others must not wait for it
            error = caught
    own = "" if error is None else str(error)
    told = worker_group.all_gather("a saved file", own)[0]
    if error is not None:
        worker_group.leave()
        raise error
    if told:
        worker_group.leave()
        raise OSError(f"Worker 0 could not save the model: {told}")
    return result


def save_tensors(
    original: Callable, saver: Any, file_prefix: Any, options: Any = None
) -> Any:
    """Write a checkpoint of TensorFlow; each of several workers into its own folder."""
    is_one_of_several = bool(_compat.own_task())
    if not is_one_of_several or not tf.executing_eagerly():
        return original(saver, file_prefix, options)
    prefix = tf.compat.as_str(tf.convert_to_tensor(file_prefix).numpy())
    return save_checkpoint_atomically(
        lambda own: original(saver, tf.constant(own), options), prefix
    )


def load_with_plain_optimizer(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function of Keras that loads with the plain optimizer."""
    if getattr(getattr(model, "optimizer", None), "is_sharded", False):
        _check_all_see(model.optimizer, args[0] if args else kwargs.get("filepath"))
    with local_variables(strategy_of(model)), plain_optimizer(model):
        return original(model, *args, **kwargs)


def _check_all_see(distributed: Any, path: Any) -> None:
    """Raise unless all workers see the file: each reads its own slices."""
    worker_group = _compat.strategy_of_optimizer(distributed).extended.worker_group
    is_there = os.path.exists(path) if isinstance(path, (str, os.PathLike)) else True
    topic = "loading a file into a sharded optimizer, which all workers have to do"
    found = worker_group.all_gather(topic, is_there)
    if any(found) and not all(found):
        raise worker_group.error(
            "Every worker has to see the file that is loaded into a sharded optimizer. "
            f"Put it where worker {found.index(False)} finds it too. Received: {path}"
        )


@contextlib.contextmanager
def plain_optimizer(model: Any, whole: FullState | None = None) -> Iterator[None]:
    """Show the user's own optimizer as the model's, as files hold it.

    Args:
        model: Keras model.
        whole: `FullState`, what was collected of sharded state, or `None`.
            Defaults to `None`.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "as_keras"):
        yield
        return
    with _compat.replaced_optimizer(model, optimizer.as_keras(whole)):
        yield


def save_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Write the sums of all replicas where Keras's own accumulators differ."""
    sums = _accumulators_of_replicas(optimizer)
    if not sums:
        original(optimizer, store)
        return
    replicas = num_replicas_of(optimizer)
    for index, variable in enumerate(optimizer.variables):
        is_sum = any(variable is item for item in sums)
        value = (
            _compat.sum_of_local_parts(variable, replicas)
            if is_sum
            else variable.numpy()
        )
        store[str(index)] = value


def load_own_variables(original: Callable, optimizer: Any, store: Any) -> None:
    """Give each replica its part of what one device had accumulated."""
    original(optimizer, store)
    for variable in _accumulators_of_replicas(optimizer):
        variable.assign(variable.numpy() / num_replicas_of(optimizer))


def _accumulators_of_replicas(optimizer: Any) -> list:
    if num_replicas_of(optimizer) == 1 or not _compat.has_accumulators(optimizer):
        return []
    return _compat.accumulators(optimizer)


def unwrap_loss_scaling(model: Any) -> None:
    """Take off the `LossScaleOptimizer` that `compile` puts around float16."""
    outer = model.optimizer
    is_scaled = isinstance(outer, keras.optimizers.LossScaleOptimizer)
    inner: Any = getattr(outer, "inner_optimizer", None)
    if is_scaled and hasattr(inner, "as_keras"):
        if inner.loss_scaling is None:
            inner.loss_scaling = loss_scaling_of(outer)
        model.optimizer = inner
