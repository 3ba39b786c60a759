"""State of compressors as tensors of a checkpoint, one for each replica.

The buckets are known only once a step has been traced, so restored values wait until
then. They are dropped if the number of replicas has changed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any

import numpy as np

from tfdp.checkpoint.index import Index, TensorMetadata
from tfdp.checkpoint.model_state import installed_features
from tfdp.checkpoint.reader import LoadPlan
from tfdp.checkpoint.replica_state import (
    LocalReplicas,
    local_replicas,
    tensor_of_replica,
)
from tfdp.ground import user_code
from tfdp.ground._compat import tf_distribute
from tfdp.ground.base.context import strategy_of
from tfdp.ground.text import pluralize
from tfdp.training.compression.residuals import ResidualState, RestoredResiduals
from tfdp.training.sharding.state_tensors import LocalShard, StateTensor

# A compressor's tensor is named `compression/DIGEST/ARRAY/replicaRANK`. The digest
# stands for the name of the compressor's state, which is a tuple and not a string.
PREFIX = "compression"
_NAME = re.compile(rf"{PREFIX}/([0-9a-f]{{16}})/([^/]+)/replica([0-9]{{1,9}})")


def residual_tensors(model: Any) -> list[StateTensor]:
    """Return state tensors of gradient compressors, such as error-feedback residuals.

    Args:
        model: Built Keras model.

    Returns:
        List of `StateTensor`, empty without compression and before the first step.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return []
    positions, replicas = _positions(model), local_replicas(model)
    states = strategy.extended.reducer.residuals.states_within(
        model.trainable_variables
    )
    return [
        _tensor_to_write(
            state, _identity(state.portable_name(positions)), name, rank, replicas
        )
        for state in states
        for name in sorted(state.initial)
        for rank in range(replicas.count)
    ]


def plan_residuals(model: Any, index: Index) -> LoadPlan:
    """Plan which tensors of compressors to read from a checkpoint.

    Args:
        model: Built Keras model.
        index: `Index` of the checkpoint.

    Returns:
        `LoadPlan` of the tensors of compressors only. If the number of replicas has
        changed, or nothing is compressed now, the plan has no tensors, and its `finish`
        warns that the saved ones are dropped.
    """
    positions, replicas = _positions(model), local_replicas(model)
    restored = RestoredResiduals(positions, {}, _identity)
    saved = [entry for entry in index.tensors if entry.name.startswith(f"{PREFIX}/")]
    matches = [(entry, _NAME.fullmatch(entry.name)) for entry in saved]
    parsed = [(entry, match) for entry, match in matches if match]
    names = [entry.name for entry in saved]
    count = 1 + max((int(match[3]) for _, match in parsed), default=-1)
    reason = ""
    if saved and count != replicas.count:
        reason = (
            f"they were saved by {pluralize(count, 'replica')}, and this run has "
            f"{replicas.count}"
        )
    elif saved and not _compresses(model):
        reason = "gradients are not compressed now"
    tensors = [
        _tensor_to_read(entry, match[1], match[2], int(match[3]), replicas, restored)
        for entry, match in (() if reason else parsed)
    ]
    known = {tensor.name for tensor in tensors}
    left_out = [name for name in names if name not in known]
    finish = functools.partial(_finish, model, restored, reason)
    return LoadPlan(tensors, left_out, finish=finish)


def _finish(model: Any, restored: RestoredResiduals, reason: str) -> None:
    """Assign restored states to the compressors; warn if saved ones were dropped.

    Args:
        model: Built Keras model.
        restored: `RestoredResiduals`, the states read from the checkpoint.
        reason: String, why saved values were dropped, or `""`.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return
    strategy.extended.reducer.residuals.restore(restored)
    if reason and strategy.extended.worker_group.is_chief:
        user_code.warn(
            "The saved residuals of compressed gradients are dropped, and begin at "
            f"zero: {reason}."
        )


def _positions(model: Any) -> dict[int, int]:
    """Return the position of each trainable variable in a model, by `id(variable)`."""
    return {id(v): position for position, v in enumerate(model.trainable_variables)}


def _identity(name: tuple) -> str:
    """Return a digest of a compressor state's name, for the names of its tensors.

    Args:
        name: Tuple, the result of `ResidualState.portable_name`.

    Returns:
        String of 16 hexadecimal digits.
    """
    return hashlib.sha256(repr(name).encode()).hexdigest()[:16]


def _compresses(model: Any) -> bool:
    """Return whether replicas send anything compressed.

    The strategy's options may compress gradients, and a feature of the model's
    `DistributedOptimizer` may compress what it exchanges.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return False
    features = installed_features(getattr(model, "optimizer", None))
    of_gradients = strategy.extended.reducer.options.compression
    return of_gradients is not None or any(f.compresses for f in features)


def _tensor_to_write(
    state: ResidualState, identity: str, name: str, rank: int, replicas: LocalReplicas
) -> StateTensor:
    """Return the tensor to save for one array of a compressor's state, on one replica.

    Args:
        state: `ResidualState`.
        identity: String, the result of `_identity`.
        name: String, name of the array.
        rank: Int, rank of the replica.
        replicas: `LocalReplicas`.
    """
    array = state.initial[name]

    def shard(local: int) -> LocalShard:
        """Return a shard that reads the array of the local replica with this index."""
        read = functools.partial(tf_distribute.elements_of, state.replicas[local][name])
        everything = functools.partial(read, 0, array.size)
        return LocalShard(0, array.size, everything, _raise_unsupported, read)

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
    """Return the tensor that restores one array of a compressor's state, on a replica.

    The values wait in `restored` until a step is traced.

    Args:
        entry: `TensorMetadata` of the tensor in the checkpoint.
        identity: String, the result of `_identity`.
        name: String, name of the array.
        rank: Int, rank of the replica.
        replicas: `LocalReplicas`.
        restored: `RestoredResiduals`.
    """

    def shard(local: int) -> LocalShard:
        """Return a shard that keeps the values of the local replica with this index."""

        def write(values: Any) -> None:
            """Keep the values in `restored`, for the reducer that traces a step.

            Its keys are the digest of the state's name, the array's name, and the index
            of the local replica.
            """
            by_name = restored.values.setdefault(identity, {})
            by_name.setdefault(name, {})[local] = np.array(values)

        return LocalShard(0, entry.size, _raise_unsupported, write)

    return tensor_of_replica(
        entry.name, entry.shape, entry.dtype, rank, replicas, shard
    )


def _raise_unsupported(*unused: Any) -> Any:
    """Raise `NotImplementedError`: a shard is either only read or only written."""
    raise NotImplementedError
