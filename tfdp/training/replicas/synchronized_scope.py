"""Strategy scope that broadcasts the first worker's initial values."""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.communication.collectives import Member
from tfdp.communication.coordination.checks import (
    check_same_variables,
    left_scope_message,
    signature_of,
)
from tfdp.communication.coordination.facts import digest
from tfdp.communication.coordination.progress import progress
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground import user_code
from tfdp.ground._compat import keras_model, patches, tensor_reads, tf_distribute
from tfdp.ground.base import step_context
from tfdp.ground.base.context import in_replica_thread, replica_context
from tfdp.ground.base.threads import run_on_thread

# Approximate number of bytes of the variables that are broadcast together: many small
# variables share a message, and host memory does not need to hold a second copy of a
# large model.
_CHUNK_BYTES = 64 * 2**20
# Largest number of bytes of a message of a broadcast: heartbeats wait behind each
# message, and on a slow link a larger message would delay them too long.
MESSAGE_BYTES = 2**22
_TOPIC = "leaving strategy.scope()"


class NewVariables:
    """Variables that a worker has created since the last broadcast.

    References to them are weak. A signature is the name, shape and dtype by which
    workers compare a variable. The signatures of collected variables are kept: whether
    a worker waits for the others must not depend on its garbage collection.
    """

    def __init__(self) -> None:
        self._records: list[tuple[weakref.ref[Any], list]] = []
        # A worker may have created variables before a step alone, for example by a
        # callback. So while the step runs, their records are kept here, apart from
        # those of the step: pairs of a weak reference to a variable and its signature.
        self.before: list[tuple[weakref.ref[Any], list]] = []
        self._are_local = False

    def __len__(self) -> int:
        """Return the number of recorded variables, with garbage-collected ones."""
        return len(self._records)

    def add(self, variable: Any) -> None:
        """Record a newly created variable, for the next broadcast.

        In a `with` block of `local` it is not recorded: this worker may be the only one
        to create it.
        """
        if not self._are_local:
            self._records.append((weakref.ref(variable), signature_of(variable)))

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Open a context whose new variables are neither compared nor broadcast.

        It is for variables that this worker may be the only one to create.
        """
        outer, self._are_local = self._are_local, True
        try:
            yield
        finally:
            self._are_local = outer

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Open a context for a step, with its new variables apart from earlier ones.

        One worker may have created earlier ones alone, for example by a callback. They
        are in the attribute `before`, and become records again at the end.
        """
        outer = self.before
        self.before, self._records = self._records, []
        try:
            yield
        finally:
            self.before, self._records = outer, self.before + self._records

    def take(self) -> CreatedVariables:
        """Remove all records and return them for `synchronize_created`."""
        records, self._records = self._records, []
        return CreatedVariables(records)


class CreatedVariables:
    """A worker's new variables, kept alive while workers compare and broadcast them.

    Args:
        records: List of pairs, a weak reference to a variable and its signature, from
            `NewVariables`.

    Attributes:
        signatures: List of all signatures, including those of variables that were
            garbage-collected.
    """

    def __init__(self, records: list[tuple[weakref.ref[Any], list]]) -> None:
        self.signatures = [signature for _, signature in records]
        self._variables = [reference() for reference, _ in records]

    @property
    def summary(self) -> dict[str, Any] | None:
        """Dict to send to the other workers, or `None` without new variables.

        `"created"` is the digest of all signatures, `"alive"` that of the signatures of
        existing variables, and `"gone"` the list of the positions of garbage-collected
        variables.
        """
        if not self._variables:
            return None
        gone = [index for index, v in enumerate(self._variables) if v is None]
        both = zip(self.signatures, self._variables, strict=True)
        alive = [signature for signature, variable in both if variable is not None]
        return {
            "created": digest(self.signatures),
            "alive": digest(alive) if alive else "",
            "gone": gone,
        }

    def without(self, gone: set[int]) -> list[Any]:
        """Return the live variables, except for some.

        Args:
            gone: Set of ints, positions in `signatures` of the variables to leave out.
        """
        return [
            v for i, v in enumerate(self._variables) if v is not None and i not in gone
        ]

    def collect_garbage(self) -> None:
        """Collect garbage, so that only variables with other references stay alive."""
        references = [None if v is None else weakref.ref(v) for v in self._variables]
        self._variables = []
        gc.collect()
        self._variables = [None if r is None else r() for r in references]


class SynchronizedScope:
    """`strategy.scope()`, which broadcasts initial values when it is left.

    Args:
        strategy: A tfdp strategy.
        stock: The context manager of the scope of TensorFlow's strategy.
        defers: Bool, whether parameters that are created inside are sharded at once.
            Defaults to `False`: as in the enclosing scope.
    """

    def __init__(self, strategy: Any, stock: Any, *, defers: bool = False) -> None:
        self._strategy = strategy
        self._stock = stock
        self._defers = defers
        self._outer: list[tuple[bool, int]] = []

    def __enter__(self) -> Any:
        """Enter TensorFlow's scope; with `defers`, new parameters are sharded."""
        extended = self._strategy.extended
        calls = extended.worker_group.num_calls
        self._outer.append((extended.defers_parameters, calls))
        extended.defers_parameters |= self._defers
        result = self._stock.__enter__()
        extended.num_scopes += 1
        return result

    @patches.filter_traceback
    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        """Leave TensorFlow's scope; broadcast new variables if it is the outermost."""
        extended = self._strategy.extended
        extended.defers_parameters, calls = self._outer.pop()
        extended.num_scopes -= 1
        result = self._stock.__exit__(kind, error, trace)
        # New variables are synchronized when the outermost of nested scopes is left.
        # After an error they are not: this worker may be the only one with the error,
        # and may enter the scope again.
        if kind is None and not extended.num_scopes:
            line = user_code.describe_user_line(inspect.currentframe())
            # If a collective ran inside the scope, all workers leave the scope and can
            # compare their variables, even if only one worker has created any.
            is_called_by_all = extended.worker_group.num_calls > calls
            # The collectives of the synchronization are the first ones of a script. If
            # a firewall blocks them, the error explains it.
            with extended.naming_lost_workers():
                synchronize_new_variables(
                    self._strategy, line, is_called_by_all=is_called_by_all
                )
        return result


def synchronize_new_variables(
    strategy: Any, line: str = "", *, is_called_by_all: bool = False
) -> None:
    """Broadcast the first worker's values of variables created since the last call.

    TensorFlow's strategy broadcasts each variable when it is created, and hangs if
    another worker creates a different one. Here workers compare the new variables first
    and then broadcast them together.

    Args:
        strategy: A tfdp strategy.
        line: String, file and line of the scope that is left, for error messages; or
            `""`. Defaults to `""`.
        is_called_by_all: Bool, whether all workers make this call, and so take part in
            the comparison even without new variables. Defaults to `False`.

    Raises:
        ValueError: On every worker, if some have created other variables; on workers
            with new variables, if another worker has left the scope without any.
    """
    new = new_variables_of(strategy)
    if new is None or in_replica_thread():
        return
    if new or is_called_by_all:
        _synchronize(strategy, new, line)
    elif line:
        progress.record_scope_left(line)


def synchronize_in_step(strategy: Any) -> None:
    """Broadcast the first worker's values of variables that an eager step has created.

    The step uses the variables immediately. Only the first local replica creates
    variables, so only its thread calls this.
    """
    new = new_variables_of(strategy)
    if new and in_replica_thread():
        _synchronize(strategy, new)


def build_in_step(optimizer: Any, variables: Sequence[Any]) -> None:
    """Build an optimizer in a step, once for all local replicas.

    If the first replica built it in its own thread, values that `build` assigns would
    not reach the other replicas. ScheduleFreeAdamW, for example, starts slots as copies
    of the weights.

    Args:
        optimizer: Keras optimizer that is not built.
        variables: Sequence of the variables that it will train.

    Raises:
        ValueError: In a `tf.function` that `strategy.run` calls, where variables cannot
            be created on all replicas.
    """

    def build(strategy: Any) -> None:
        """Build the optimizer in cross-replica context; broadcast its new slots."""
        # `init_scope` builds outside of the step's graph. If the first trace of a
        # `tf.function` creates variables, TensorFlow traces it again for the second
        # step, and that trace would draw the first step's random numbers again.
        in_build = step_context.using(builds_optimizer=True)
        with in_build, tf.init_scope(), strategy.scope():
            optimizer.build(list(variables))
        # The current step uses the slots, so they must be equal on all workers now.
        synchronize_new_variables(strategy)

    context = replica_context()
    if context is not None and tf_distribute.can_merge():
        context.merge_call(build)
        optimizer.built = True
        return
    is_inside = context is not None and not tf.executing_eagerly()
    if is_inside and tensor_reads.step_graph() is None:
        # A replica that creates variables inside of a `tf.function` waits for the other
        # replicas, which wait for it: the step would hang.
        raise ValueError(
            f"The optimizer {optimizer.name!r} would be built by an update inside of a "
            "`tf.function` that `strategy.run` calls. Build it before, in the scope: "
            "`optimizer.build(model.trainable_variables)`."
        )
    if is_inside:
        # In a branch or loop of the step, replicas cannot enter cross-replica context.
        # Another thread does, as slots in the branch would be written there by one
        # replica for all, and the branches would wait for each other.
        build = keras_model.in_state_of_caller(build)
        run_on_thread("tfdp builds optimizer", build, context.strategy).result()
    else:
        optimizer.build(list(variables))
    optimizer.built = True


def _synchronize(strategy: Any, new: NewVariables, line: str = "") -> None:
    """Broadcast worker 0's values of the variables created since the last broadcast.

    During a step, variables from before the step are included only if they are the same
    on all workers: one worker may have created some alone, for example by a callback.

    Args:
        strategy: A tfdp strategy of several workers.
        new: `NewVariables` of this worker.
        line: String, file and line of the scope that is left, or `""`. Defaults to
            `""`.
    """
    group: WorkerGroup = strategy.extended.worker_group

    def check(rank: int) -> None:
        """Raise if only this worker has new variables, and `rank` left the scope."""
        other, own = group.progress_of(rank), created.signatures
        if own and other is not None and progress.has_left_scope(other, line):
            raise ValueError(left_scope_message(rank, line, own))

    with tf.init_scope():
        created, earlier = new.take(), CreatedVariables(new.before)
        own = [created.summary, earlier.summary]
        gathered = group.all_gather(_TOPIC, own, check=check)
        synchronize_created(strategy, created, [now for now, _ in gathered])
        summaries = [then for _, then in gathered]
        if len({then and then["created"] for then in summaries}) == 1:
            new.before = []
            synchronize_created(strategy, earlier, summaries)


def new_variables_of(strategy: Any) -> NewVariables | None:
    """Return the record of this worker's new variables; `None` for a single worker."""
    extended = strategy.extended
    return None if extended.worker_group.num_workers == 1 else extended.new_variables


@contextlib.contextmanager
def synchronizing_step(strategy: Any) -> Iterator[None]:
    """Open a context for a step, at whose end its new variables are broadcast.

    Optimizers may create their variables while a step is traced. Variables that
    callbacks have created earlier are broadcast too if all workers have the same ones.
    Workers compare them only after steps that communicate by the worker group, such as
    the first one of a loop.

    Args:
        strategy: A tfdp strategy.
    """
    new, group = new_variables_of(strategy), strategy.extended.worker_group
    calls = group.num_calls
    with contextlib.nullcontext() if new is None else new.in_step():
        yield
        synchronize_new_variables(strategy, is_called_by_all=group.num_calls > calls)


@contextlib.contextmanager
def local_variables(strategy: Any) -> Iterator[None]:
    """Open a context whose new variables are not broadcast, such as views for a file.

    Args:
        strategy: A strategy of tfdp or of another package, or `None`.
    """
    new = getattr(getattr(strategy, "extended", None), "new_variables", None)
    with contextlib.nullcontext() if new is None else new.local():
        yield


def synchronize_created(
    strategy: Any, created: CreatedVariables, summaries: list[dict[str, Any] | None]
) -> None:
    """Broadcast the variables that all workers have created. All workers call it.

    If all have created the same ones, those that some worker has garbage-collected are
    left out. If not, those that still exist must be the same, and are broadcast.

    Args:
        strategy: A tfdp strategy of several workers.
        created: `CreatedVariables` of this worker.
        summaries: List of the `CreatedVariables.summary` of each worker: a dict, or
            `None` for a worker without new variables.

    Raises:
        ValueError: On every worker, if some have other variables.
    """
    empty: dict[str, Any] = {"created": "", "alive": "", "gone": []}
    filled = [summary or empty for summary in summaries]
    gone: set[int] = set()
    if len({text["created"] for text in filled}) == 1:
        gone = {index for text in filled for index in text["gone"]}
    elif len({text["alive"] for text in filled}) > 1:
        created.collect_garbage()
        variables = created.without(set())
        group: WorkerGroup = strategy.extended.worker_group
        check_same_variables(group, _TOPIC, variables, "creates")
    broadcast_variables(strategy, created.without(gone))


def broadcast_variables(strategy: Any, variables: Sequence[Any]) -> None:
    """Broadcast the first worker's values of variables to all workers.

    Args:
        strategy: A tfdp strategy.
        variables: Sequence of mirrored `tf.Variable`s of the strategy, in the same
            order on every worker.
    """
    texts = [variable for variable in variables if variable.dtype == tf.string]
    if texts:
        _broadcast_texts(strategy, texts)
    chunk: list[tuple[Any, np.ndarray]] = []
    size = 0
    for variable in variables:
        if variable.dtype == tf.string:
            continue
        # The shape of the variable may be unknown, unlike that of its value.
        value = np.asarray(variable.values[0].numpy())
        chunk.append((variable, value))
        size += value.nbytes
        if size >= _CHUNK_BYTES:
            _broadcast_chunk(strategy, chunk)
            chunk, size = [], 0
    if chunk:
        _broadcast_chunk(strategy, chunk)


def _broadcast_texts(strategy: Any, variables: list[Any]) -> None:
    """Broadcast worker 0's values of string variables, and assign them."""
    group: WorkerGroup = strategy.extended.worker_group
    values = [tf.io.serialize_tensor(v.values[0]).numpy() for v in variables]
    first, *_ = group.all_gather(_TOPIC, [value.hex() for value in values])
    for variable, text in zip(variables, first, strict=True):
        value = tf.io.parse_tensor(bytes.fromhex(text), tf.string)
        for part in variable.values:
            part.assign(value)


def _broadcast_chunk(strategy: Any, chunk: list[tuple[Any, np.ndarray]]) -> None:
    """Broadcast worker 0's values of one chunk of variables, and assign them.

    Args:
        strategy: A tfdp strategy.
        chunk: List of pairs of a mirrored `tf.Variable` and its value on this worker.
    """
    extended = strategy.extended
    local_bytes = b"".join(value.tobytes() for _, value in chunk)
    data = broadcast_bytes(extended, local_bytes)
    if extended.worker_group.rank == 0:
        return
    begin = 0
    for variable, old in chunk:
        end = begin + old.nbytes
        value = np.frombuffer(data[begin:end], old.dtype).reshape(old.shape)
        for part in variable.values:
            part.assign(value)
        begin = end


def broadcast_bytes(extended: Any, own: bytes) -> bytes:
    """Broadcast the first worker's bytes to all workers. All workers call it.

    Args:
        extended: Extended class of a tfdp strategy.
        own: Bytes of this worker, of the same length on every worker.

    Returns:
        Bytes of the first worker.
    """
    # The bytes are sent as int32, a dtype that every collective supports.
    words = np.frombuffer(own + b"\0" * (-len(own) % 4), np.int32)
    num_words = MESSAGE_BYTES // words.itemsize
    received = [
        Member(extended.host_group, 0).broadcast(
            tf.constant(words[first : first + num_words])
        )
        for first in range(0, len(words), num_words)
    ]
    if extended.worker_group.rank == 0:
        return own
    return b"".join(message.numpy().tobytes() for message in received)[: len(own)]
