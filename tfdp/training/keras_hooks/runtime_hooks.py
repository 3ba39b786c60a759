"""TensorFlow under tfdp: replica contexts, tapes, traced functions, seeds, caches.

Each function replaces a TensorFlow function and receives it as `original`, before the
function's own arguments; the table is in `tfdp.training.keras_hooks.install`. Keras's
steps are traced as the program of one device, which `tfdp.training.program` then
divides among the replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import end_failed_call, one_at_a_time
from tfdp.communication.coordination.worker_group import latest_group
from tfdp.ground._compat import keras_model, owners, programs
from tfdp.ground.base import program_trace, step_context
from tfdp.ground.base.context import in_tfdp_scope, outside_tfdp_scope
from tfdp.training.parameters.gathers import backward_pass, marked_backward_pass
from tfdp.training.replicas.random_seed import stand_in_seed


def all_reduce(
    original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """All-reduce a value; in a step traced as on one device, return it unchanged.

    `original` is the method of `tf.distribute.ReplicaContext`, here `context`.

    Returns:
        Value like `value`.
    """
    if program_trace.current() is not None:
        return value
    return original(context, reduce_op, value, options)


def replica_id(original: Callable, context: Any) -> Any:
    """Return the replica's id in `context`; 0 in a step traced as on one device."""
    if program_trace.current() is not None:
        return tf.zeros([], tf.int32)
    return original(context)


def call_for_each_replica(
    original: Callable, strategy: Any, function: Callable, args: tuple, kwargs: dict
) -> Any:
    """Run a function on each local replica, with this thread's tfdp and Keras state.

    Returns:
        Results of the function, as TensorFlow's method `original` returns them.
    """
    function = keras_model.in_state_of_caller(function)
    return original(strategy, step_context.in_context_of_caller(function), args, kwargs)


def gradient(
    original: Callable,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Compute gradients as `GradientTape.gradient`, and mark the backward pass.

    In a backward pass, sharded parameters are gathered again. While Keras builds a
    model symbolically, gradients with respect to variables are zeros: some variables
    have no value yet, and outside of replicas TensorFlow finds no gradients of others.

    Returns:
        Nest like `sources`, of a gradient or `None` for each source.
    """
    variables = (keras.Variable, tf.Variable)
    if keras_model.is_built_symbolically() and any(
        isinstance(source, variables) for source in tf.nest.flatten(sources)
    ):
        return tf.nest.map_structure(tf.zeros_like, sources)
    trace = program_trace.traced()
    program_trace.record_losses(tf.nest.flatten(target))
    marked = backward_pass() if trace is None else marked_backward_pass(trace)
    with marked, outside_tfdp_scope():
        return original(tape, target, sources, output_gradients, unconnected_gradients)


def reset_default_graph(original: Callable) -> None:
    """Reset the default graph by `original`, except in the scope of a tfdp strategy.

    `keras.utils.clear_session` calls it. With a new graph the scope would end.
    """
    if not in_tfdp_scope():
        original()


def hash_once(original: Callable, signature: Any) -> int:
    """Return the hash of `signature`, a traced function's type, computed only once.

    TensorFlow looks up a traced function by a type that lists all captures, and hashes
    the list at every call, once or twice for each variable. The types are immutable:
    TensorFlow also stores other derived values in them.
    """
    value = getattr(signature, "_tfdp_hash", None)
    if value is None:
        value = original(signature)
        vars(signature)["_tfdp_hash"] = value
    return value


def call_flat(original: Callable, function: Any, *args: Any) -> Any:
    """Call a traced function of TensorFlow; if it fails, end its pending collectives.

    Functions with collectives run one at a time. If only a failed collective is
    reported, tfdp's error with the reason replaces it.

    Returns:
        Result of the function, as TensorFlow's method `original` returns it.
    """
    try:
        with one_at_a_time(function, args):
            return original(function, *args)
    except tf.errors.OpError as error:
        explained = end_failed_call(args, error)
        if explained is error:
            raise
        raise explained from None


def check_destinations(original: Callable, destinations: Any) -> bool:
    """Return whether a reduction has destinations, such as a variable or a device.

    For other values, TensorFlow's function `original` decides. A string counts as a
    device. The empty string counts, too: it stands for the current device, and is the
    device of an argument of a `tf.function`.
    """
    kinds = (tf.distribute.DistributedValues, str)
    return isinstance(destinations, kinds) or original(destinations)


def cache(
    original: Callable, dataset: Any, filename: Any = "", name: str | None = None
) -> Any:
    """Cache a dataset by `Dataset.cache`, with several workers in a file for each one.

    `.worker1` and the like is appended to `filename`. TensorFlow locks a cache file, so
    a second worker would fail.

    Returns:
        `tf.data.Dataset`, the cached one.
    """
    group = latest_group()
    is_path = isinstance(filename, (str, os.PathLike))
    if filename and is_path and group is not None and group.num_workers > 1:
        filename = f"{os.fspath(filename)}.worker{group.rank}"
    return original(dataset, filename, name)


def seeds_of_operation(original: Callable, op_seed: Any) -> Any:
    """Return an operation's two seeds; its own seed overrides tfdp's global seed.

    `stand_in_seed` is the global seed that tfdp sets where the user sets none. An
    operation with its own seed gets the pair that it would have without a global seed.
    In an optimizer's update each operation has its own seed, the same on all replicas.

    Args:
        original: Callable, `get_seed` of TensorFlow.
        op_seed: Int, the operation's own seed, or `None`.

    Returns:
        Tuple of two ints, or of `None` twice, as from TensorFlow's `get_seed`.
    """
    draws = step_context.current().update_draws
    if op_seed is None and draws is not None:
        op_seed = next(draws)
    seeds = original(op_seed)
    if op_seed is not None and seeds[0] == stand_in_seed():
        return owners.random_seed.DEFAULT_GRAPH_SEED, seeds[1]
    return seeds


def key_of_generator(original: Callable, generator: Any, key: Any) -> Any:
    """Return the random key of a replica, derived from a `tf.random.Generator`'s key.

    TensorFlow's method `original` derives it, different for each replica. In a step
    that is traced as on one device, and in an optimizer's update, the key is returned
    unchanged.

    Returns:
        Tensor, the key.
    """
    context = step_context.current()
    if context.trace is not None or context.update_draws is not None:
        return key
    return original(generator, key)


def call_function(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `tf.function`; inline it while a step is traced as on one device.

    The program of the step then includes the updates inside the function.

    Returns:
        Result of the function.
    """
    if program_trace.traced() is None or tf.executing_eagerly():
        return original(function, *args, **kwargs)
    return programs.call_inline(function, *args, **kwargs)
