"""Steps that Keras passes to `strategy.run`: traced, compiled or run eagerly."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdp.communication.collectives import step_events
from tfdp.ground import user_code
from tfdp.ground._compat import graphs, tf_distribute
from tfdp.ground.base import batch_weight, loops, xla
from tfdp.ground.base.batch_weight import BatchWeight
from tfdp.ground.base.context import strategy_of
from tfdp.training.data import batch_weights
from tfdp.training.data.other_rows import unwrap_other_rows
from tfdp.training.data.rows import count_of, first_tensor, num_rows, rows_of_rank
from tfdp.training.keras_hooks.logs import metric_states
from tfdp.training.program.divisions import replica_count_name
from tfdp.training.program.eager import EagerStep
from tfdp.training.program.step import DividedStep, rows_of_replica
from tfdp.training.reduction.training_group import merging_group, training_group
from tfdp.training.step.empty_step import record_changes_without_data
from tfdp.training.step.step import RowDivider, active
from tfdp.training.strategy.compiled_step import CompiledStep

_LIBRARIES = ("keras", "tensorflow", "tfdp")


def prepare_run(strategy: Any, fn: Callable, args: tuple) -> tuple[Callable, tuple]:
    """Prepare a step that Keras passes to `strategy.run`; leave other calls alone.

    A call is a step if a loop of Keras with a model of this strategy is running, and
    the arguments have data. In a graph, each of several replicas then runs its part of
    the program that one device would run; an eager step runs on the rows of all
    replicas. A traced step waits for its data, and is compiled by XLA if that is
    wanted.

    Args:
        strategy: A tfdp strategy.
        fn: Callable, the replica function.
        args: Tuple of the function's arguments.

    Returns:
        Tuple of the function that replicas run in place of `fn`, and its arguments
        without the wrappers that tfdp puts around batches.
    """
    loop = loops.current()
    divider = _divider_of_rows(strategy, loop, args)
    args = _pass_through_features(loop, divider, args)
    args, total = batch_weights.unpack_counted(args)
    args, others = unwrap_other_rows(args)
    if loop is None:
        _warn_of_former_batch(strategy, args)
    if loop is None or strategy_of(loop.model) is not strategy:
        return fn, args
    loop.has_run = True
    if loop.receives_global_batches and strategy.num_replicas_in_sync > 1:
        whole = first_tensor(args)
        loops.record_batch_rows(None if whole is None else whole.shape[0])
        args = tuple(_split_global_batch(strategy, argument) for argument in args)
    args = keras.tree.map_structure(_none_for_optional, args)
    if loop.exchange is not None:
        args = loop.exchange.begin_step(args, total)
    local = [
        tf_distribute.select_replica(replica, args)
        for replica in range(strategy.extended.num_local)
    ]
    if first_tensor(local[0]) is None:
        # A function without data is not a step: a callback or an optimizer runs it, for
        # example to change variables.
        return fn, args
    parts = batch_weights.weigh_batches(
        local, merging_group(strategy), strategy.num_replicas_in_sync, total
    )
    for feature in active.active():
        feature.begin_batch(loop.model, local)
    step_events.record_batch(
        parts[0].num_samples if parts else _local_samples(local[0])
    )
    is_whole = parts is None and divider is None
    if is_whole and not xla.should_compile():
        return _wait_for_data(loop, fn), args
    loop.program_logs = None
    step: Callable
    if is_whole:
        compiled = CompiledStep(lambda args, _: fn(*args), strategy, loop)
        step = functools.wraps(fn)(lambda *args: compiled(args, None))
    elif parts is not None and tf.executing_eagerly():
        return _eager_step(strategy, loop, fn, local, parts), args
    else:
        step = _divided_step(
            strategy, loop, fn, local, parts or [None], total, others, divider
        )
    return _wait_for_data(loop, step), args


def run_after(operations: list, fn: Callable) -> Callable:
    """Wrap a replica function to run after `operations`; if empty, return it as is."""
    if not operations:
        return fn

    @functools.wraps(fn)
    def after(*args: Any, **kwargs: Any) -> Any:
        """Run the function after the operations, and return its result."""
        with tf.control_dependencies(operations):
            return fn(*args, **kwargs)

    return after


def _warn_of_former_batch(strategy: Any, args: tuple) -> None:
    """Warn of a batch that was probably read for workers that have changed since.

    The sign is that a loop of the user's own has read data before, but none since the
    workers changed.

    Args:
        strategy: A tfdp strategy.
        args: Tuple, arguments of the replica function of a loop of the user's own.
    """
    extended = strategy.extended
    if extended.read_generation in (None, extended.generation):
        return
    if first_tensor(args) is not None:
        user_code.warn(
            "`strategy.run` got a batch, but no data was read since the workers "
            "changed: a batch from before has the rows of the former workers. Take it "
            "from a dataset that is distributed again.",
            once_for=extended,
            topic=f"former batch {extended.generation}",
        )


def _divided_step(
    strategy: Any,
    loop: loops.Loop,
    fn: Callable,
    local: list,
    parts: Sequence[BatchWeight | None],
    total: tf.Tensor | None,
    others: frozenset[int],
    divider: RowDivider | None,
) -> Callable:
    """Wrap a replica function: the replicas divide its work on the global batch.

    The wrapper takes the arguments of `fn`, those of the calling replica, and returns
    what `fn` returns.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that the step belongs to.
        fn: Callable, the replica function that Keras has passed.
        local: List of the arguments of each local replica.
        parts: Sequence of the `BatchWeight` of each local replica, or `None`.
        total: Scalar tensor, the number of rows of the global batch, or `None`.
        others: Frozen set of ints, flat positions of the arguments whose number of rows
            differs from that of the batch.
        divider: `RowDivider` that divides a replica's rows into micro-batches, or
            `None`.
    """
    if strategy.extended.balance is not None:
        # The load balancer divides rows unevenly, so a replica's rows do not follow
        # from the total.
        total = None
    are_alike = batch_weights.have_equal_rows(local, merging_group(strategy))
    divided = DividedStep(strategy, loop, fn, others, divider)
    # Whether XLA is wanted is read once for all replicas, because the answer changes if
    # the step of the first replica builds the model.
    compiles = xla.should_compile()
    counts = {
        rank: tf.cast(count_of(first), tf.int32)
        for rank, batch in enumerate(local, strategy.extended.first_rank)
        if (first := first_tensor(batch)) is not None
    }

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        """Run the calling replica's part of the step, and return its result."""
        replica = tf_distribute.local_replica_id(tf.distribute.get_replica_context())
        part = parts[replica]
        group = training_group(strategy)
        if loop.trains:
            for feature in active.active():
                group = feature.regroup(group)
        rows = rows_of_replica(group, args, total, counts, are_alike=are_alike)

        def run(args: tuple, part: BatchWeight | None) -> Any:
            """Run the calling replica's step.

            Args:
                args: Tuple, the arguments of the replica.
                part: `BatchWeight` of the replica, or `None` if batches are not
                    weighted.

            Returns:
                This replica's result of the step.
            """
            replica_rows = rows
            if xla.is_tracing() and not are_alike:
                # Shapes are static inside a function that XLA compiles, so the number
                # of rows is read from the shape of the batch there.
                replica_rows = dataclasses.replace(
                    rows, own=tf.shape(first_tensor(args))[0], outside=rows
                )
            with batch_weight.use(part):
                return divided(args, group, replica_rows)

        if compiles:
            result = CompiledStep(run, strategy, loop)(args, part)
        else:
            result = run(args, part)
        if strategy.num_replicas_in_sync == 1 and divided.tail is not None:
            # Keras merges logs only if there are several replicas, so the logs of a
            # single replica are computed here.
            return divided.tail.compute(
                [[own] for own in result], lambda values: [own for (own,) in values]
            )
        loop.program_logs = divided.tail
        return result

    return step


def _divider_of_rows(
    strategy: Any, loop: loops.Loop | None, args: tuple
) -> RowDivider | None:
    """Return the `RowDivider` that divides a step's rows into micro-batches, or `None`.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that is running, or `None`.
        args: Tuple of the arguments of the function that runs on replicas.

    Returns:
        `RowDivider` that is active in the model's `DistributedOptimizer`. `None` if
        none is, or if the step is eager, has no data, or does not train a model of the
        strategy.
    """
    if loop is None or not loop.trains or strategy_of(loop.model) is not strategy:
        return None
    has_data = first_tensor(tf_distribute.select_replica(0, args)) is not None
    if loop.features is None or tf.executing_eagerly() or not has_data:
        return None
    return loop.features.divider_of_rows


def _pass_through_features(
    loop: loops.Loop | None, divider: RowDivider | None, args: tuple
) -> tuple:
    """Pass the arguments of a step through the features that keep or replace its batch.

    Args:
        loop: `Loop` of Keras that is running, or `None`. In one that trains, each
            active `LoopFeature` may replace the arguments.
        divider: `RowDivider` that keeps the batch, so that the step can be repeated; or
            `None`.
        args: Tuple of the arguments of the function that runs on replicas.

    Returns:
        Tuple like `args`, with which the step runs.
    """
    if divider is not None:
        args = divider.keep_batch(args)
    for feature in active.active() if loop is not None and loop.trains else ():
        args = feature.replace_batch(args)
    return args


def _eager_step(
    strategy: Any, loop: loops.Loop, fn: Callable, local: list, parts: list[BatchWeight]
) -> Callable:
    """Return an eager step, which computes the rows of all replicas at once.

    It replaces `fn` on each replica.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras that the step belongs to.
        fn: Callable, the replica function that Keras has passed.
        local: List of the arguments of each local replica.
        parts: List of the `BatchWeight` of each local replica.
    """
    loop.batch_weights = [part.weight for part in parts]
    step = EagerStep(
        strategy,
        fn,
        parts,
        local,
        merging_group(strategy),
        metric_states(loop.model),
        returns_rows="predict" in loop.name,
    )
    if loop.independent_groups is None:
        step.prepare()
    return step


def _none_for_optional(part: Any) -> Any:
    """Return `None` for a `tf.experimental.Optional`, and other parts unchanged.

    Keras passes a `None` that a Python generator yields as an empty optional.
    """
    first = part.values[0] if isinstance(part, tf_distribute.PerReplica) else part
    return None if isinstance(first, tf.experimental.Optional) else part


def record_replica_count_name(strategy: Any, reader: types.FrameType) -> None:
    """Record the name that a user's line gives to the number of replicas.

    The name is kept in the strategy's `replica_count_names`. Steps that are traced
    later warn of a loss that is divided by the number.

    Args:
        strategy: A tfdp strategy.
        reader: Frame that reads `num_replicas_in_sync`. Frames of Keras, TensorFlow and
            tfdp are ignored.
    """
    module = reader.f_globals.get("__name__", "")
    if module.partition(".")[0] in _LIBRARIES:
        return
    line = user_code.text_of_line(reader.f_code.co_filename, reader.f_lineno)
    name = replica_count_name(line)
    if name is not None:
        strategy.extended.replica_count_names.add(name)


def _wait_for_data(loop: loops.Loop, fn: Callable) -> Callable:
    """Return a step that runs `fn`, whose operations wait for the step's data.

    In a training loop it also runs the hooks `around_step` of features: before `fn`,
    and the callables that they return after it.

    At the end of the data the iterator fails, and operations that did not wait for it,
    such as the counter of iterations, would already have run.
    """
    if tf.executing_eagerly():
        return fn

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        """Run the step once its data has arrived, and return its outputs."""
        data = [x for x in tf.nest.flatten(args) if tf.is_symbolic_tensor(x)]
        begins = step_events.record_step_begin(data)
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        with tf.control_dependencies(begins), graphs.independent_side_effects():
            after = _begin_features(loop)
            outputs = fn(*args)
            for finish in after:
                finish()
        record_changes_without_data(loop.model, graph.get_operations()[first:], data)
        return outputs

    return step


def _begin_features(loop: loops.Loop) -> list[Callable[[], None]]:
    """Call `around_step` of features; return their callables to run after the step."""
    if not loop.trains:
        return []
    own = loop.features.active if loop.features else []
    after = [f.around_step(loop.model) for f in (*own, *active.active())]
    return [finish for finish in after if finish is not None]


def _local_samples(batch: Any) -> tf.Tensor | None:
    """Return the number of rows of a replica's batch, or `None` without a tensor."""
    first = first_tensor(batch)
    return None if first is None else num_rows(first)


def _split_global_batch(strategy: Any, batch: Any) -> Any:
    """Return a nest of global arrays as a per-replica value of local replicas' rows."""
    tensors = keras.tree.map_structure(
        lambda x: x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x), batch
    )
    num_replicas = strategy.num_replicas_in_sync

    def rows_of(rank: int) -> Any:
        """Return a nest of a replica's rows of the global batch, by its rank."""
        return keras.tree.map_structure(
            lambda x: None if x is None else rows_of_rank(x, rank, num_replicas),
            tensors,
        )

    return tf_distribute.per_replica(list(map(rows_of, strategy.extended.local_ranks)))
