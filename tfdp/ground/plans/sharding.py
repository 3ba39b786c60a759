"""Options of sharding: the stage of ZeRO, the scope, offload and parameter units."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp.ground.arguments import check_choice
from tfdp.ground.plans.units import DEFAULT_UNITS, UnitOptions

# Each value shards what the earlier values shard, and more, so the index of a value is
# its stage of ZeRO.
SHARDINGS = ("none", "optimizer", "gradients", "parameters")


@dataclasses.dataclass(frozen=True)
class ShardingOptions:
    """Validated options of sharded state.

    Args:
        sharding: String: `"none"`, `"optimizer"`, `"gradients"` or `"parameters"`.
            Defaults to `"none"`.
        shard_scope: String, the replicas that share the state: `"all"`, or those of a
            `"node"`. Defaults to `"all"`.
        offload: String, `"cpu"`: shards are stored and updated in host memory; or
            `None`. Defaults to `None`.
        units: `UnitOptions` of sharded parameters. Defaults to `UnitOptions()`.

    Raises:
        ValueError: If a value is unknown, or an option would have no effect.

    Example:

    >>> ShardingOptions("optimizer", "node").text
    'sharding="optimizer", shard_scope="node", offload=None'
    """

    sharding: Any = "none"
    shard_scope: Any = "all"
    offload: Any = None
    units: UnitOptions = DEFAULT_UNITS

    def __post_init__(self) -> None:
        check_choice("sharding", self.sharding, SHARDINGS)
        check_choice("shard_scope", self.shard_scope, ("all", "node"))
        check_choice("offload", self.offload, (None, "cpu"))
        if self.offload and not self.shards_state:
            raise ValueError(
                "`offload` needs sharded state. Set `sharding`. Received: "
                f"offload={self.offload!r}, sharding={self.sharding!r}"
            )
        if not self.shards_parameters and self.units.gather_compression:
            raise ValueError(
                "`gather_compression` is for sharded parameters, stage 3. In other "
                "stages the gathered weights are a replica's only copy, so rounding "
                "would lose small updates. Received: "
                f"gather_compression={self.units.gather_compression!r}, "
                f"sharding={self.sharding!r}"
            )
        if not self.shards_parameters and self.units != DEFAULT_UNITS:
            raise ValueError(
                "`gather_groups`, `reshard_after_forward` and `prefetch` need sharded "
                'parameters. Set `sharding="parameters"`, stage 3. Received: '
                f"{self.units.text}, sharding={self.sharding!r}"
            )

    @property
    def shards_state(self) -> bool:
        """Bool, whether the state of the optimizer is sharded (ZeRO-1 to 3)."""
        return self.sharding != "none"

    @property
    def shards_gradients(self) -> bool:
        """Bool, whether accumulated gradients are sharded too (ZeRO-2 and 3)."""
        return self.sharding in ("gradients", "parameters")

    @property
    def shards_parameters(self) -> bool:
        """Bool, whether the variables are sharded too (ZeRO-3)."""
        return self.sharding == "parameters"

    @property
    def config(self) -> dict[str, Any]:
        """Dict, the options as arguments of a `DistributedOptimizer`."""
        config = dataclasses.asdict(self)
        units = config.pop("units")
        return {**config, "gather_groups": list(units.pop("layers")), **units}

    @property
    def text(self) -> str:
        """String, the options as keyword arguments in source code."""
        offload = "None" if self.offload is None else f'"{self.offload}"'
        text = (
            f'sharding="{self.sharding}", shard_scope="{self.shard_scope}", '
            f"offload={offload}"
        )
        return f"{text}, {self.units.text}" if self.shards_parameters else text


# Optimizers that shard nothing, such as those of Keras, share these options, so that
# callers need not check for `None`.
NOT_SHARDED = ShardingOptions()
