"""Sharded optimizer state: each replica updates its shard of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.ground.arguments import is_integer
from tfdp.ground.plans.units import UnitOptions, groups_of
from tfdp.training.optimizer.distributed import DistributedOptimizer
from tfdp.training.sharding.options import SHARDINGS, ShardingOptions


class ShardedOptimizer(OptimizerCallback):
    """Shard the state of the model's optimizer, with the same result as without.

    Gradients are reduce-scattered, each replica updates the part that it owns, and
    the new weights are all-gathered: as many bytes as an all-reduce, and the slots
    of Adam, say, take one N-th of the memory on each of N replicas. Slots that Keras
    has built are shared out and freed before the first step; an optimizer that was
    given to `compile` as `DistributedOptimizer(..., sharding="optimizer")` never has
    them. Files are those of plain Keras.

    Args:
        stage: Int: 1, slots are sharded (ZeRO-1); 2, accumulated gradients too
            (ZeRO-2); or 3, the weights too, of which a step gathers what it computes
            with (ZeRO-3). Defaults to 1.
        shard_scope: String: `"all"`, or `"node"`, where every node has the whole
            state, so that less travels between nodes. Defaults to `"all"`.
        offload: `"cpu"`: what is sharded is kept and updated in the memory of the
            host, for models whose state does not fit into that of the GPUs; or
            `None`. Defaults to `None`.
        gather_groups: In stage 3, a sequence of strings: names of layers, the
            parameters of each of which are gathered together. Those of other layers
            are grouped by size. Defaults to none.
        reshard_after_forward: In stage 3, `True`: what was gathered is freed when its
            layers have run, and gathered again for the backward pass; `False`: it is
            kept until then, for fewer bytes and more memory; or `"node"`: it is
            gathered again inside of nodes only. Defaults to `True`.
        prefetch: In stage 3, an int: groups that are gathered ahead of the one that
            computes. Defaults to 1.
        gather_compression: In stage 3, `"int8"`: matrices and the like are gathered in
            8 bits an element, and computed with as rounded; each replica's part of
            them is not rounded. Or `None`. Defaults to `None`.
        units: The old name of `gather_groups`.

    Raises:
        ValueError: If an argument is none of these.

    Example:

    >>> ShardedOptimizer(stage=2).options.sharding
    'gradients'

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Ren et al.
    2021, https://arxiv.org/abs/2101.06840, for offload; Wang et al. 2023, ZeRO++,
    https://arxiv.org/abs/2306.10209, for compressed gathers.
    """

    # Callbacks that write files have to run on every worker.
    shards = True

    # Settings that all workers have to share.
    compared = ("settings",)

    def __init__(
        self,
        stage: int = 1,
        shard_scope: str = "all",
        offload: str | None = None,
        *,
        gather_groups: Sequence[str] = (),
        reshard_after_forward: bool | str = True,
        prefetch: int = 1,
        gather_compression: str | None = None,
        units: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not is_integer(stage) or stage not in (1, 2, 3):
            raise ValueError(f"`stage` must be 1, 2 or 3. Received: stage={stage!r}")
        unit_options = UnitOptions(
            groups_of(gather_groups, units),
            reshard_after_forward,
            prefetch,
            gather_compression,
        )
        self.options = ShardingOptions(
            SHARDINGS[stage], shard_scope, offload, unit_options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Dict, the options as arguments of a `DistributedOptimizer`."""
        return self.options.config

    def switch_on(self, optimizer: DistributedOptimizer) -> None:
        """Shard the optimizer; one that is sharded like this stays as it is."""
        optimizer.note_model(self.model)
        optimizer.shard(self.options)
