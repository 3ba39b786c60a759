"""State of compressors as tensors of a checkpoint, one for each replica.

Which buckets there are is only known once a step is traced, so that what is read may
have to wait for it. It is of no use to another number of replicas.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

import numpy as np

from tfdp.checkpoint.index import Index, TensorMetadata
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.replica_state import (
    LocalReplicas,
    local_replicas,
    tensor_of_replica,
)
from tfdp.ground import _compat, user_code
from tfdp.ground.base.context import strategy_of
from tfdp.ground.text import pluralize
from tfdp.training.compression.residuals import ResidualState, RestoredResiduals
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

PREFIX = "compression"
_NAME = re.compile(rf"{PREFIX}/([0-9a-f]{{16}})/([^/]+)/replica([0-9]{{1,9}})")


def residual_tensors(model: Any) -> list[StateTensor]:
    """State tensors of what compressors have kept of a model's gradients.

    Args:
        model: Built Keras model.

    Returns:
        List of `StateTensor`, empty where nothing is compressed, or no step was made.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return []
    places, replicas = _places(model), local_replicas(model)
    states = strategy.extended.reducer.residuals.states_within(
        model.trainable_variables
    )
    return [
        _tensor_of(state, _identity(state.name_for(places)), name, rank, replicas)
        for state in states
        for name in sorted(state.initial)
        for rank in range(replicas.count)
    ]


def plan_residuals(model: Any, index: Index) -> LoadPlan:
    """Plan which tensors of compressors' state to read of a checkpoint.

    Args:
        model: Built Keras model.
        index: `Index` of the checkpoint.
    """
    places, replicas = _places(model), local_replicas(model)
    restored = RestoredResiduals(places, {}, _identity)
    saved = [entry for entry in index.tensors if entry.name.startswith(f"{PREFIX}/")]
    matches = [(entry, _NAME.fullmatch(entry.name)) for entry in saved]
    parsed = [(entry, match) for entry, match in matches if match]
    names = [entry.name for entry in saved]
    count = 1 + max((int(match[3]) for _, match in parsed), default=-1)
    reason = ""
    if saved and count != replicas.count:
        reason = (
            f"they are those of {pluralize(count, 'replica')}, and there "
            f"{'is' if replicas.count == 1 else 'are'} {replicas.count} now"
        )
    elif saved and not _compresses(model):
        reason = "gradients are not compressed now"
    tensors = [
        _tensor_to_read(entry, match[1], match[2], int(match[3]), replicas, restored)
        for entry, match in (() if reason else parsed)
    ]
    known = {tensor.name for tensor in tensors}
    left_out = [name for name in names if name not in known]
    finish = functools.partial(_hand_over, model, restored, reason)
    return LoadPlan(tensors, left_out, finish=finish)


def _hand_over(model: Any, restored: RestoredResiduals, reason: str) -> None:
    """Hand over what was read; say why something was not."""
    strategy = strategy_of(model)
    if strategy is None:
        return
    strategy.extended.reducer.residuals.restore(restored)
    if reason and strategy.extended.worker_group.is_chief:
        user_code.warn(
            "The errors of compressed gradients that were saved are dropped, and "
            f"begin at zero: {reason}."
        )


def _places(model: Any) -> dict[int, int]:
    return {id(v): place for place, v in enumerate(model.trainable_variables)}


def _identity(name: tuple) -> str:
    return hashlib.sha256(repr(name).encode()).hexdigest()[:16]


def _compresses(model: Any) -> bool:
    strategy = strategy_of(model)
    if strategy is None:
        return False
    features = getattr(getattr(model, "optimizer", None), "features", None)
    local_steps = None if features is None else features.alone
    outer = None if local_steps is None else local_steps.options.outer
    exchange = None if outer is None else outer.compression
    of_steps = strategy.extended.reducer.options.compression
    return of_steps is not None or exchange is not None


def _tensor_of(
    state: ResidualState, identity: str, name: str, rank: int, replicas: LocalReplicas
) -> StateTensor:
    """State tensor of the value of a replica, which its own process writes."""
    array = state.initial[name]

    def shard(local: int) -> LocalShard:
        read = functools.partial(_compat.elements_of, state.replicas[local][name])
        everything = functools.partial(read, 0, array.size)
        return LocalShard(0, array.size, everything, _refuse, read)

    full_name, dtype = f"{PREFIX}/{identity}/{name}/replica{rank}", array.dtype.name
    return tensor_of_replica(full_name, array.shape, dtype, rank, replicas, shard)


def _tensor_to_read(
    entry: TensorMetadata,
    identity: str,
    name: str,
    rank: int,
    replicas: LocalReplicas,
    restored: RestoredResiduals,
) -> StateTensor:
    """State tensor of a replica's value, which waits until a step asks for it."""

    def shard(local: int) -> LocalShard:
        def write(values: Any) -> None:
            by_name = restored.values.setdefault(identity, {})
            by_name.setdefault(name, {})[local] = np.array(values)

        return LocalShard(0, entry.size, _refuse, write)

    return tensor_of_replica(
        entry.name, entry.shape, entry.dtype, rank, replicas, shard
    )


def _refuse(*unused: Any) -> Any:
    """Stand for reading what is to be read from a file, or writing what is saved."""
    raise NotImplementedError
