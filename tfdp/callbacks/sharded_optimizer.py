"""Sharded optimizer state: each replica updates its shard of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdp.callbacks.bases import OptimizerCallback
from tfdp.ground._compat import keras_model
from tfdp.ground.arguments import is_integer
from tfdp.ground.plans.sharding import SHARDINGS, ShardingOptions
from tfdp.ground.plans.units import UnitOptions, resolve_gather_groups
from tfdp.training.optimizer.distributed import DistributedOptimizer


class ShardedOptimizer(OptimizerCallback):
    """Shard the state of the model's optimizer, with the same result as unsharded.

    Gradients are reduce-scattered, each replica updates its shard, and the new weights
    are all-gathered: this transfers as many bytes as an all-reduce, and slots, such as
    those of Adam, take 1/N of the memory on each of N replicas. Slots that Keras has
    built are sharded and freed before the first step; an optimizer that was passed to
    `compile` as `DistributedOptimizer(..., sharding="optimizer")` never allocates them
    in full. Files have the format of plain Keras.

    Args:
        stage: Int: 1, slots are sharded (ZeRO-1); 2, also accumulated gradients
            (ZeRO-2); or 3, also the weights, which each step gathers layer by layer
            (ZeRO-3). Defaults to 1.
        shard_scope: String: `"all"`, shards over all replicas; or `"node"`, over the
            replicas of each node, for less communication between nodes. Defaults to
            `"all"`.
        offload: `"cpu"`: shards are stored and updated in host memory, for models whose
            state does not fit into GPU memory; or `None`. Defaults to `None`.
        gather_groups: In stage 3, a sequence of strings: names of layers. The
            parameters of each named layer are gathered together; other layers are
            grouped by size. Defaults to none.
        reshard_after_forward: In stage 3, `True`: gathered weights are freed after
            their layers' forward pass, and gathered again for the backward pass;
            `False`: they are kept until then, for fewer bytes and more memory; or
            `"node"`: they are gathered again within nodes only. Defaults to `True`.
        prefetch: In stage 3, an int: the number of groups that are gathered ahead of
            the one that computes. Defaults to 1.
        gather_compression: In stage 3, `"int8"`: matrices and higher-rank weights are
            gathered in 8 bits per element, and the step computes with the rounded
            values; the shards themselves are not rounded. Or `None`. Defaults to
            `None`.
        units: The old name of `gather_groups`.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    >>> ShardedOptimizer(stage=2).options.sharding
    'gradients'

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Ren et al.
    2021, https://arxiv.org/abs/2101.06840, for offload; Wang et al. 2023, ZeRO++,
    https://arxiv.org/abs/2306.10209, for compressed gathers.
    """

    # Workers save sharded state by gathering it together. So if a callback has this
    # attribute, `fit` runs the callbacks that write files on every worker.
    shards = True

    # All workers must shard the state alike, so `fit` raises an error if the settings
    # differ between workers.
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
            resolve_gather_groups(gather_groups, units),
            reshard_after_forward,
            prefetch,
            gather_compression,
        )
        self.options = ShardingOptions(
            SHARDINGS[stage], shard_scope, offload, unit_options
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Dict, the options as keyword arguments of a `DistributedOptimizer`."""
        return self.options.config

    def enable_feature(self, optimizer: DistributedOptimizer) -> None:
        """Shard the optimizer, unless it is already sharded with these options."""
        optimizer.register_model(self.model)
        optimizer.shard(self.options)
        # Parameters that are sharded after a step was traced would not be those that
        # the step updates: it may train by other optimizers, and not build this one.
        layers = keras_model.layers_of(self.model)
        is_built = self.model.built and all(layer.built for layer in layers)
        if self.options.shards_parameters and is_built:
            variables = self.model.trainable_variables
            if variables and not optimizer.built:
                optimizer.build(variables)
