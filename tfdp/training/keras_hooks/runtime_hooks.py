"""TensorFlow under tfdp: replica contexts, tapes, traced functions, seeds, caches.

Each function takes the place of one of TensorFlow, see
`tfdp.training.keras_hooks.install`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp.communication.collectives import end_failed_call
from tfdp.ground import _compat
from tfdp.ground.base import program_trace, stand_in_seed
from tfdp.training.parameters.gathers import backward_pass, marked_backward_pass


def all_reduce(
    original: Callable, context: Any, reduce_op: Any, value: Any, options: Any = None
) -> Any:
    """Leave a value as it is in the program of one device."""
    if program_trace.current() is not None:
        return value
    return original(context, reduce_op, value, options)


def replica_id(original: Callable, context: Any) -> Any:
    """Return that of one device in its program."""
    if program_trace.current() is not None:
        return tf.zeros([], tf.int32)
    return original(context)


def gradient(
    original: Callable,
    tape: Any,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
) -> Any:
    """Mark a backward pass, in which sharded parameters are gathered again."""
    trace = program_trace.traced()
    if trace is not None:
        trace.losses += tf.nest.flatten(target)
    with backward_pass() if trace is None else marked_backward_pass(trace):
        return original(tape, target, sources, output_gradients, unconnected_gradients)


def hash_once(original: Callable, signature: Any) -> int:
    """Hash the type of a traced function once, not at every call.

    TensorFlow looks a traced function up by a type that names everything that
    the function captures, and hashes it all at every call, once or twice for
    each variable. The types are immutable: TensorFlow keeps other values that
    it derives from them in the same way.
    """
    found = getattr(signature, "_tfdp_hash", None)
    if found is None:
        found = original(signature)
        vars(signature)["_tfdp_hash"] = found
    return found


def call_flat(original: Callable, function: Any, *args: Any) -> Any:
    """Call a traced function; if it ends with an error, so do its collectives."""
    try:
        return original(function, *args)
    except tf.errors.OpError as error:
        explained = end_failed_call(args, error)
        if explained is error:
            raise
        raise explained from None


def cache(
    original: Callable, dataset: Any, filename: Any = "", name: str | None = None
) -> Any:
    """Cache a dataset; each of several workers in a file of its own.

    TensorFlow locks the file of a cache, so that a second worker fails.
    """
    task = _compat.own_task()
    if filename and task and isinstance(filename, (str, os.PathLike)):
        # "/job:worker/task:1" gives "worker1".
        suffix = task.removeprefix("/job:").replace("/task:", "")
        filename = f"{os.fspath(filename)}.{suffix}"
    return original(dataset, filename, name)


def seeds_of_operation(original: Callable, op_seed: Any) -> Any:
    """Leave operations with a seed their numbers, see `stand_in_seed`."""
    seeds = original(op_seed)
    if op_seed is not None and seeds[0] == stand_in_seed.seed():
        return _compat.random_seed.DEFAULT_GRAPH_SEED, seeds[1]
    return seeds


def key_of_generator(original: Callable, generator: Any, key: Any) -> Any:
    """Draw as one device does, not otherwise on each replica."""
    if program_trace.current() is not None:
        return key
    return original(generator, key)


def call_function(original: Callable, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Trace a `tf.function` that a step calls as a part of the step.

    An update inside of it is one of the program, and has its place there.
    """
    if program_trace.traced() is None or tf.executing_eagerly():
        return original(function, *args, **kwargs)
    return _compat.call_inline(function, *args, **kwargs)
