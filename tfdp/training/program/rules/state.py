"""Rules of variables, random numbers and Python functions; `None` for other operations.

A shared state, such as a table, is one that all replicas of a worker use.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp.ground._compat import programs, tf_data
from tfdp.ground.base import xla
from tfdp.training.program.facts import own_rows, part, whole, with_rows
from tfdp.training.program.sizes import axis_of_rows
from tfdp.training.program.view import (
    AS_IS,
    PART,
    WHOLE,
    CannotDivideError,
    Decision,
    Need,
    OperationView,
    operations,
)

ASSIGNMENTS = operations("AssignVariableOp AssignAddVariableOp AssignSubVariableOp")
READS = frozenset(("ReadVariableOp",))


def decide_variable(view: OperationView) -> Decision | None:
    """Decide how replicas build a read or a write of a variable.

    States of metrics stay partial sums; any other variable has the same value on every
    replica. The decision is `None` for another operation, or if the indices of a
    `ResourceGather` have no rows.
    """
    reads = bool(view.op.outputs) and view.type != "VariableShape"
    if reads and view.scope.is_shared(view.op):
        return _decide_shared_read(view)
    if view.type in READS:
        shape = view.output_sizes()
        is_part = view.scope.is_metric(view.op.inputs[0])
        return Decision([AS_IS], [part(shape) if is_part else whole(shape)])
    if view.type in ASSIGNMENTS:
        is_part = view.scope.is_metric(view.op.inputs[0])
        return Decision([AS_IS, PART if is_part else WHOLE], [])
    if view.type == "ResourceGather":
        indices = view.facts[1]
        if not indices.is_rows or view.attribute("batch_dims"):
            return None
        shape = view.output_sizes()
        if shape is None:
            return None
        row_sizes = with_rows(shape, indices.axis, indices.multiple)
        return Decision([AS_IS, AS_IS], [own_rows(row_sizes, indices.axis)])
    return None


def _decide_shared_read(view: OperationView) -> Decision:
    """Decide how replicas build a read of a state that a worker's replicas share.

    TensorFlow orders all operations on one state, so a second replica would read what
    the first one has written. So one replica of each worker reads the state, and all
    use the value of the first worker. If its shape is static, the result is a partial
    sum, with zeros on all other replicas. Otherwise the value is broadcast.

    Raises:
        CannotDivideError: In a loop, which must have no collectives.
    """
    if view.scope.num_loops:
        raise CannotDivideError(
            view.op,
            "reads, in a loop, a state that the step writes and that all replicas of "
            "a process share",
            "Read it before the loop, or create a variable inside `strategy.scope()`.",
        )
    needs = [AS_IS] + [WHOLE] * (len(view) - 1)
    outputs = view.op.outputs
    if all(t.dtype != tf.string and t.shape.is_fully_defined() for t in outputs):
        return Decision(needs, view.part_outputs(), _build_shared_read)
    return Decision(
        needs, view.whole_outputs(), _build_and_broadcast, has_collective=True
    )


_STATELESS_RANDOM = operations(
    """
    StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 StatelessRandomUniform
    StatelessRandomNormal StatelessTruncatedNormal StatelessRandomUniformInt
    StatelessRandomGammaV3 StatelessRandomBinomial StatelessRandomPoisson
    """
)
# These generators can start at any position, so a replica draws only the block of
# numbers of its own rows.
_SEEKABLE = frozenset(("StatelessRandomUniformV2", "StatelessRandomNormalV2"))


def decide_random(view: OperationView) -> Decision | None:
    """Decide how replicas draw stateless random numbers: each those of its own rows.

    Together they are the numbers of one device, unless XLA compiles the step. The
    decision is `None` for another operation, or if the shape is not known or has no
    axis of rows.
    """
    if view.type not in _STATELESS_RANDOM:
        return None
    shape = view.facts[0].value
    if shape is None:
        return None
    axis = axis_of_rows(shape)
    if axis is None or any(fact.is_rows for fact in view.facts):
        return None
    if any(size.kind == "unknown" for size in shape):
        # Only the random numbers for a sparse tensor have a shape with an unknown size.
        # Sparse tensors are whole, so the numbers are not divided.
        return None
    fact = own_rows(tuple(shape), axis)
    skips = view.type in _SEEKABLE and axis == 0
    dtype = view.op.outputs[0].dtype
    if skips and dtype in (tf.float32, tf.float16, tf.bfloat16):
        needs: list[Need] = [AS_IS] + [WHOLE] * (len(view) - 1)
        return Decision(needs, [fact], _build_own_block)
    return Decision([WHOLE] * len(view), [fact], _build_and_slice)


def _build_and_slice(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the random numbers of all rows, and slice this replica's rows.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    return [builder.take_rows(op.outputs[0], builder.copy(op, replica_inputs)[0])]


def _build_own_block(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build the random numbers of this replica's rows; earlier ones are skipped.

    If XLA compiles the step, each replica draws from a stream of its own instead.

    Philox generates four numbers for each value of its counter: Salmon et al. 2011,
    https://doi.org/10.1145/2063384.2063405.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    (fact,) = builder.facts_of(op.outputs)
    shape, key, counter, algorithm = replica_inputs
    if xla.is_tracing():
        # XLA orders the numbers in another way and needs a static count, so a block
        # cannot be cut out. Each replica has a stream of its own instead.
        stream = tf.cast(builder.replica.rank, tf.uint64) * tf.constant(
            2**32, tf.uint64
        )
        apart = tf.stack([counter[0], counter[1] + stream])
        return builder.copy(op, [shape, key, apart, algorithm])
    row_size = tf.reduce_prod(tf.cast(shape[1:], tf.int64))
    begin = tf.cast(builder.first_entry(fact.multiple, shape), tf.int64) * row_size
    size = tf.cast(shape[0], tf.int64) * row_size
    group = begin // 4
    offset = begin - group * 4
    length = (offset + size + 3) // 4 * 4
    low = counter[0] + tf.cast(group, tf.uint64)
    carry = tf.cast(low < counter[0], tf.uint64)
    ahead = tf.stack([low, counter[1] + carry])
    flat = builder.copy(
        op, [tf.cast(tf.reshape(length, [1]), shape.dtype), key, ahead, algorithm]
    )[0]
    own = tf.reshape(flat[offset : offset + size], shape)
    return [builder.with_shape(own, op.outputs[0], fact)]


def may_write_state(op: Any) -> bool:
    """Return whether an operation may write a state, such as a variable or a table."""
    is_stateful = programs.has_effect(op) and not programs.has_function(op)
    return is_stateful and op.type not in _READ_ONLY


# TensorFlow marks these operations as stateful, but they only read a state, so they do
# not count as writes.
_READ_ONLY = operations(
    """
    ReadVariableOp LookupTableExportV2 LookupTableFindV2 LookupTableSizeV2
    ResourceGather ResourceGatherNd VarHandleOp VarIsInitializedOp VariableShape
    """
)


def prints_or_summarizes(op: Any) -> bool:
    """Return whether an operation prints text or writes a summary."""
    return "Summary" in op.type or op.type == "PrintV2"


# These operations draw from a stateful generator, which cannot skip the numbers of
# other replicas, so the first replica draws for all. Their first input is the shape of
# the numbers: if it has an axis of rows, each replica slices its own rows of them.
_SHAPED_RANDOM = operations(
    """
    RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomGamma
    RandomPoissonV2 ParameterizedTruncatedNormal
    """
)
STATEFUL_RANDOM = _SHAPED_RANDOM | operations(
    """
    RandomShuffle Multinomial RandomCrop NonDeterministicInts Timestamp
    AllCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler
    LogUniformCandidateSampler ThreadUnsafeUnigramCandidateSampler
    UniformCandidateSampler SampleDistortedBoundingBox SampleDistortedBoundingBoxV2
    """
)


def decide_stateful_random(view: OperationView) -> Decision | None:
    """Decide how replicas build stateful random numbers, drawn on the first replica.

    In a loop, which must have no collectives, each replica draws the same numbers. The
    decision is `None` for another operation.
    """
    if view.type not in STATEFUL_RANDOM:
        return None
    needs: list[Need] = [WHOLE] * len(view)
    shape = view.facts[0].value if view.type in _SHAPED_RANDOM else None
    axis = None
    if shape is not None:
        shape = tuple(shape)
        if view.type in ("RandomGamma", "RandomPoissonV2"):
            shape = (*shape, *(view.facts[1].sizes or ()))
        axis = axis_of_rows(shape)
    if shape is not None and axis is not None and shape[axis].number is not None:
        fact = own_rows(shape, axis)
        return Decision(needs, [fact], _build_rows_of_first, has_collective=True)
    if view.scope.num_loops:
        programs.seed_operation(view.op)
        return Decision(needs, view.whole_outputs())
    return Decision(needs, view.part_outputs(shape), _build_as_partial_sum)


def _build_as_partial_sum(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build an operation; replace its outputs by zeros on all but the first replica.

    Returns:
        List of this replica's outputs of `op` from `replica_inputs`.
    """
    return [
        builder.replica.as_partial_sum(tensor)
        for tensor in builder.copy(op, replica_inputs)
    ]


def _build_rows_of_first(builder: Any, op: Any, replica_inputs: list) -> list:
    """Draw random numbers for all rows on the first replica, and slice own rows.

    Later operations then stay divided by rows.

    Returns:
        List of one tensor, this replica's output of `op` from `replica_inputs`.
    """
    (total,) = builder.replica.sum(_build_as_partial_sum(builder, op, replica_inputs))
    builder.cache_whole(op.outputs[0], total)
    return [builder.take_rows(op.outputs[0], total)]


def decide_python(view: OperationView) -> Decision | None:
    """Decide how replicas build a call of a Python function, such as `tf.py_function`.

    The first replica calls it for all. The decision is `None` for another operation.
    """
    # A Python function may draw random numbers, count its calls or write files, so it
    # runs as often as on one device, except in loops, where each replica calls it.
    if view.type not in tf_data.PYTHON_FUNCTIONS:
        return None
    return Decision(
        [WHOLE] * len(view), view.whole_outputs(), _build_python, has_collective=True
    )


def _build_python(builder: Any, op: Any, replica_inputs: list) -> list:
    """Call the function on the first replica, and broadcast its results.

    In a loop, which must have no collectives, each replica calls it. TensorFlow keeps
    one tape for all calls of a function, which the gradient of the first call consumes:
    a second call would have no gradient.

    Returns:
        List of this replica's outputs of `op` from `replica_inputs`.
    """
    if builder.is_in_loop:
        return builder.copy(op, replica_inputs)
    return _build_and_broadcast(builder, op, replica_inputs)


def _build_and_broadcast(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build an operation on the first replica, and broadcast its results.

    Other replicas do not know the shapes of the results.

    Returns:
        List of this replica's outputs of `op` from `replica_inputs`.
    """
    replica = builder.replica
    is_first = not replica.rank
    outputs = builder.copy(op, replica_inputs) if is_first else [None] * len(op.outputs)
    # Other replicas have to take part in the gathers of the inputs, though they do not
    # build the operation. The control dependency keeps these gathers in their graphs.
    with tf.control_dependencies([] if is_first else replica_inputs):
        return [
            replica.broadcast_from_first(own, tensor.dtype, tensor.shape)
            for own, tensor in zip(outputs, op.outputs, strict=True)
        ]


def _build_shared_read(builder: Any, op: Any, replica_inputs: list) -> list:
    """Build a read of a state that the replicas of a worker share and the step writes.

    Replicas that do not read it return zeros. Where the value is needed whole, a sum
    over replicas gives it to all.

    Args:
        builder: `Builder` of the replica's program.
        op: `tf.Operation` of the program, the read.
        replica_inputs: List of the replica's inputs of `op`.

    Returns:
        List of this replica's partial sums, one for each output of `op`.
    """
    if not builder.replica.is_writer:
        return [tf.zeros(tensor.shape, tensor.dtype) for tensor in op.outputs]
    return _build_as_partial_sum(builder, op, replica_inputs)
