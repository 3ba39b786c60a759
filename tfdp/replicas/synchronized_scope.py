"""Strategy scope that broadcasts the first worker's initial values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp.base.context import in_replica_thread
from tfdp.collectives import broadcast
from tfdp.coordination.checks import check_same_variables

# One broadcast carries many variables, but not so many that a second copy of
# a large model has to fit into host memory.
_CHUNK_BYTES = 64 * 2**20
# The heartbeats of workers wait behind a message on a slow link, and must not for long.
MESSAGE_BYTES = 2**22


class SynchronizedScope:
    """`strategy.scope()`, which broadcasts initial values when it is left.

    Args:
        strategy: A tfdp strategy.
        stock: The stock context manager.
        defers: Bool, whether parameters made inside are sharded at once. Defaults to
            `False`: as in the scope around it.
    """

    def __init__(self, strategy: Any, stock: Any, *, defers: bool = False) -> None:
        self._strategy = strategy
        self._stock = stock
        self._defers = defers
        self._outer: list[bool] = []

    def __enter__(self) -> Any:
        extended = self._strategy.extended
        self._outer.append(extended.defers_parameters)
        extended.defers_parameters |= self._defers
        return self._stock.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        self._strategy.extended.defers_parameters = self._outer.pop()
        result = self._stock.__exit__(kind, error, trace)
        if kind is None:
            # Its collectives are the first of a script: a firewall shows here.
            with self._strategy.extended.explaining():
                synchronize_new_variables(self._strategy)
        return result


def synchronize_new_variables(strategy: Any) -> None:
    """Broadcast the first worker's values of variables created since the last call.

    Stock broadcasts each variable when it is created, and hangs if another
    worker creates a different one. Here they are compared first and then
    travel together.
    """
    pending = getattr(strategy.extended, "new_variables", None)
    if pending and not in_replica_thread():
        with tf.init_scope():
            _synchronize(strategy)


def _synchronize(strategy: Any) -> None:
    pending = strategy.extended.new_variables
    variables = [v for v in (reference() for reference in pending) if v is not None]
    pending.clear()
    worker_group = strategy.extended.worker_group
    if worker_group.num_workers == 1:
        return
    check_same_variables(worker_group, "leaving strategy.scope()", variables, "creates")
    broadcast_variables(strategy, variables)


def broadcast_variables(strategy: Any, variables: Sequence[Any]) -> None:
    """Broadcast the first worker's values of variables to all workers.

    Args:
        strategy: A tfdp strategy.
        variables: Sequence of its mirrored `tf.Variable`s, in the same order
            on every worker.
    """
    chunk: list[Any] = []
    size = 0
    for variable in variables:
        chunk.append(variable)
        size += variable.shape.num_elements() * variable.dtype.size
        if size >= _CHUNK_BYTES:
            _broadcast_chunk(strategy, chunk)
            chunk, size = [], 0
    if chunk:
        _broadcast_chunk(strategy, chunk)


def _broadcast_chunk(strategy: Any, variables: list[Any]) -> None:
    extended = strategy.extended
    values = [np.asarray(v.values[0].numpy()) for v in variables]
    own = b"".join(value.tobytes() for value in values)
    data = first_workers_bytes(extended, own)
    if extended.worker_group.rank == 0:
        return
    begin = 0
    for variable, old in zip(variables, values, strict=True):
        end = begin + old.nbytes
        value = np.frombuffer(data[begin:end], old.dtype).reshape(old.shape)
        for part in variable.values:
            part.assign(value)
        begin = end


def first_workers_bytes(extended: Any, own: bytes) -> bytes:
    """Broadcast bytes of the first worker. All workers call it.

    Args:
        extended: Extended class of a tfdp strategy.
        own: Bytes, of the same number on every worker.

    Returns:
        Bytes, those of the first worker.
    """
    # Bytes as int32, a dtype that every collective knows.
    words = np.frombuffer(own + b"\0" * (-len(own) % 4), np.int32)
    num_words = MESSAGE_BYTES // words.itemsize
    received = [
        broadcast(
            tf.constant(words[first : first + num_words]),
            extended.host_group,
            0,
        )
        for first in range(0, len(words), num_words)
    ]
    if extended.worker_group.rank == 0:
        return own
    return b"".join(message.numpy().tobytes() for message in received)[: len(own)]
