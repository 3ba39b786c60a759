"""Sharded parameters as whole tensors of a checkpoint."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tfdp import _compat
from tfdp.parameters.gathers import Gathers
from tfdp.parameters.sharded_parameter import ShardedParameter
from tfdp.sharding.state_tensors import READ_ELEMENTS, LocalShard, StateTensor


def parameter_state(name: str, parameter: ShardedParameter) -> StateTensor:
    """State tensor of a sharded parameter, of which each replica has its part.

    Args:
        name: String, unique among all.
        parameter: `ShardedParameter`.

    Returns:
        `StateTensor`.
    """
    gathers = parameter.reader
    assert isinstance(gathers, Gathers)
    owned: list[LocalShard] = []
    local_shards: list[LocalShard] = []
    for replica, part in enumerate(parameter.values):
        start, stop = parameter.ranges[gathers.owner(replica)]
        if start == stop:
            continue
        shard = _shard(parameter, part, start, stop)
        local_shards.append(shard)
        if gathers.groups.is_first_copy(replica):
            owned += shard.split(READ_ELEMENTS)
    shape = tuple(parameter.whole_shape)
    dtype = parameter.dtype.name
    return StateTensor(name, shape, dtype, tuple(owned), tuple(local_shards))


def _shard(parameter: ShardedParameter, part: Any, start: int, stop: int) -> LocalShard:
    read = functools.partial(_compat.elements_of, part)

    def write(values: Any) -> None:
        part.assign(np.asarray(values).reshape(part.shape))
        parameter.reader.forget(parameter)

    return LocalShard(start, stop, lambda: read(0, stop - start), write, read)
