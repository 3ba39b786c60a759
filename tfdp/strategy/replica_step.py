"""Steps that Keras hands to `strategy.run`: rows and weight of each replica."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdp import _compat, user_code
from tfdp.base import batch_weight, loops, xla
from tfdp.base.batch_weight import BatchWeight
from tfdp.base.context import strategy_of
from tfdp.collectives import step_events
from tfdp.data import batch_weights
from tfdp.data.rows import count_of, first_tensor, num_rows, rows_of_rank
from tfdp.keras_hooks.logs import metric_states
from tfdp.local_steps import merging_group, training_group
from tfdp.losses import loss_terms
from tfdp.losses.row_forms.form import CONSTANT
from tfdp.losses.row_forms.forms import Forms
from tfdp.program.divisions import name_of_count
from tfdp.program.eager import EagerStep
from tfdp.program.step import DividedStep, rows_of_replica
from tfdp.replicas import drift_probe
from tfdp.step.empty_step import note_changes_without_data
from tfdp.strategy.compiled_step import CompiledStep

_LIBRARIES = ("keras", "tensorflow", "tfdp")


def prepare_run(
    strategy: Any, fn: Callable, args: tuple
) -> tuple[Callable, tuple, list | None]:
    """Prepare what Keras gives to `strategy.run`; leave other calls alone.

    Args:
        strategy: A tfdp strategy.
        fn: Callable, the replica function.
        args: Tuple, its arguments.

    Returns:
        Tuple of function, arguments and the local replicas' shares of the
        global batch, see `tfdp.data.batch_weights`.
    """
    args, total = batch_weights.unpack_counted(args)
    loop = loops.current()
    if loop is None or strategy_of(loop.model) is not strategy:
        return fn, args, None
    if loop.whole_batches and strategy.num_replicas_in_sync > 1:
        whole = first_tensor(args)
        loops.note_batch_rows(None if whole is None else whole.shape[0])
        args = tuple(_split(strategy, argument) for argument in args)
    args = keras.tree.map_structure(_none_for_optional, args)
    local = [
        _compat.select_replica(replica, args)
        for replica in range(strategy.extended.num_local)
    ]
    parts = batch_weights.weigh_batches(
        local, merging_group(strategy), strategy.num_replicas_in_sync, total
    )
    drift_probe.begin_step(loop.model, local)
    step_events.record_batch(parts[0].num_samples if parts else _own_samples(local[0]))
    if parts is None and not xla.is_wanted():
        return _after_its_data(loop.model, fn), args, None
    told = strategy.extended.told_of_losses.setdefault(loop.model, set())
    loop.program_logs = None
    if parts is not None and _is_divided(loop, local):
        divided = _divided_step(strategy, loop, fn, local, parts, total, told)
        return _after_its_data(loop.model, divided), args, None
    if parts is not None and tf.executing_eagerly():
        return _eager_step(strategy, loop, fn, local, parts), args, None
    step = _after_its_data(
        loop.model, _step_of_replica(strategy, loop, fn, parts, told)
    )
    if parts is None:
        return step, args, None
    weights = [part.weight for part in parts]
    loop.batch_weights = weights
    return step, args, weights


def _is_divided(loop: loops.Loop, local: list) -> bool:
    """Return whether a step is divided as the program of one device."""
    return not (tf.executing_eagerly() or first_tensor(local[0]) is None)


def _divided_step(
    strategy: Any,
    loop: loops.Loop,
    fn: Callable,
    local: list,
    parts: list[BatchWeight],
    total: tf.Tensor | None,
    told: set[str],
) -> Callable:
    """Return the step of a replica as its part of the program of one device."""
    if strategy.extended.balance is not None:
        total = None  # Rows are divided by weight.
    are_alike = batch_weights.are_alike(local, merging_group(strategy))
    divided = DividedStep(strategy, loop, fn)
    counts = {
        rank: tf.cast(count_of(first_tensor(batch)), tf.int32)
        for rank, batch in enumerate(local, strategy.extended.first_rank)
    }

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        replica = _compat.local_replica_id(tf.distribute.get_replica_context())
        part = dataclasses.replace(parts[replica], is_part_of_sum=True)
        group = training_group(strategy)
        rows = rows_of_replica(group, args, total, counts, are_alike=are_alike)

        def run(args: tuple, part: BatchWeight | None) -> Any:
            own = rows
            if xla.is_tracing() and not are_alike:
                # Shapes have to be known where XLA compiles.
                own = dataclasses.replace(rows, own=tf.shape(first_tensor(args))[0])
            with batch_weight.use(part):
                return divided(args, group, own)

        if xla.is_wanted():
            result = CompiledStep(run, strategy, loop, told)(args, part)
        else:
            result = run(args, part)
        loop.program_logs = divided.tail
        return result

    return step


def _eager_step(
    strategy: Any, loop: loops.Loop, fn: Callable, local: list, parts: list[BatchWeight]
) -> Callable:
    """Return the step of a replica where nothing is traced: that of one device."""
    parts = [dataclasses.replace(part, is_part_of_sum=True) for part in parts]
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
    if not loop.steps_alone:
        step.prepare()
    return step


def _none_for_optional(part: Any) -> Any:
    """`None` where a generator has it; Keras does so for what one replica gets."""
    first = part.values[0] if isinstance(part, _compat.PerReplica) else part
    return None if isinstance(first, tf.experimental.Optional) else part


def _step_of_replica(
    strategy: Any,
    loop: loops.Loop,
    fn: Callable,
    parts: list[BatchWeight] | None,
    told: set[str],
) -> Callable:
    """The step of a replica, whose gradients and logs count by its part of the batch.

    Args:
        strategy: A tfdp strategy.
        loop: `Loop` of Keras, whose step it is.
        fn: Callable, the step that Keras gives.
        parts: List of `BatchWeight`, one for each local replica, or `None`.
        told: Set of strings, subjects of which the user has been warned.
    """

    def weigh(args: tuple, part: BatchWeight | None) -> Any:
        if part is None:
            return fn(*args)
        if not tf.executing_eagerly():
            part = dataclasses.replace(part, forms=_forms(strategy, args, part, told))
        with batch_weight.use(part):
            return keras.tree.map_structure(loss_terms.scale_to_row_mean, fn(*args))

    run = CompiledStep(weigh, strategy, loop, told) if xla.is_wanted() else weigh

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        if parts is None:
            return run(args, None)
        replica = _compat.local_replica_id(tf.distribute.get_replica_context())
        return run(args, dataclasses.replace(parts[replica], weighted=set()))

    return step


def _forms(strategy: Any, args: tuple, part: BatchWeight, told: set[str]) -> Forms:
    """The forms of a step that is traced: those of its batch and of its weight."""
    batch = [x for x in tf.nest.flatten(args) if _is_traced(x)]
    forms = Forms(
        batch,
        strategy.num_replicas_in_sync,
        told,
    )
    if tf.is_symbolic_tensor(part.weight):
        # A factor of the loss that keeps its form.
        forms.set(part.weight, CONSTANT)
    return forms


def _is_traced(value: Any) -> bool:
    composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor))
    return composite or tf.is_symbolic_tensor(value)


def note_count_read(strategy: Any, reader: types.FrameType) -> None:
    """Note that a user asks for the number of replicas: a loss may be divided by it.

    Args:
        strategy: A tfdp strategy.
        reader: Frame that asks.
    """
    module = reader.f_globals.get("__name__", "")
    if module.partition(".")[0] in _LIBRARIES:
        return
    line = user_code.text_of_line(reader.f_code.co_filename, reader.f_lineno)
    name = name_of_count(line)
    if name is not None:
        strategy.extended.names_of_count.add(name)
    forms = batch_weight.forms()
    if forms is not None:
        forms.counts_replicas = True


def _after_its_data(model: Any, fn: Callable) -> Callable:
    """Start a step only when its data is there.

    At the end of the data the iterator fails while operations that do not wait
    for it, such as the counter of iterations, would already have run.
    """
    if tf.executing_eagerly():
        return fn

    @functools.wraps(fn)
    def step(*args: Any) -> Any:
        data = [x for x in tf.nest.flatten(args) if tf.is_symbolic_tensor(x)]
        begins = step_events.record_step_begin(data)
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        with tf.control_dependencies(begins), _compat.ordered_by_itself():
            outputs = fn(*args)
        note_changes_without_data(model, graph.get_operations()[first:], data)
        return outputs

    return step


def _own_samples(batch: Any) -> tf.Tensor | None:
    first = first_tensor(batch)
    return None if first is None else num_rows(first)


def _split(strategy: Any, batch: Any) -> Any:
    """Split a global batch into the rows of each local replica."""
    extended = strategy.extended
    tensors = keras.tree.map_structure(
        lambda x: None if x is None else _tensor(x), batch
    )
    return _compat.per_replica(
        [
            _rows_of(
                tensors, extended.first_rank + replica, strategy.num_replicas_in_sync
            )
            for replica in range(extended.num_local)
        ]
    )


def _rows_of(batch: Any, rank: int, num_replicas: int) -> Any:
    return keras.tree.map_structure(
        lambda x: None if x is None else rows_of_rank(x, rank, num_replicas), batch
    )


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)
