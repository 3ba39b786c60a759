"""Sides on two hosts: workers, variants, the rates of the link and its traffic."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

from tfdp.launch.bench.sides import Side, worker_commands, worker_environment
from tools.bench.hosts_bed import INTERFACE, TwoHosts

_IDLE_SECONDS = 3.0
RATES = ("200mbit", "1gbit")
# The goals are for a link slow enough to be the bottleneck, not the processors.
RATE_OF_GOALS = "200mbit"
# While all sides send their models to the other host at once, heartbeats wait behind
# them in the same connections, and give up after some seconds.
RATE_OF_START = "10gbit"
TFDP_VARIANTS: dict[str, dict[str, Any]] = {
    "ring": {"algorithm": "ring"},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical bf16": {"algorithm": "hierarchical", "compression": "bf16"},
}
# With one worker on each host there is nothing to reduce inside of it.
TFDP_VARIANTS_OF_SINGLES: dict[str, dict[str, Any]] = {
    "ring": {"algorithm": "ring"},
    "ring bf16": {"algorithm": "ring", "compression": "bf16"},
}
STOCK_VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "packs of 8 MB": {"pack_bytes": 8 * 2**20},
}


def tfdp_variants(workers_per_host: int) -> dict[str, dict[str, Any]]:
    """Options of tfdp's variants, by name."""
    return TFDP_VARIANTS if workers_per_host > 1 else TFDP_VARIANTS_OF_SINGLES


@dataclasses.dataclass(frozen=True)
class Block:
    """Traffic of the link while a variant had its turn.

    Args:
        num_steps: Int, steps of the block.
        seconds: Float, wall time between the two readings of the counters.
        num_bytes: Pair of ints, sent by each host.
    """

    num_steps: int
    seconds: float
    num_bytes: tuple[int, int]

    def bytes_per_step(self, idle_bytes_per_second: float) -> float:
        """Bytes of a step in the direction that carried more, less idle traffic."""
        idle_bytes = self.seconds * idle_bytes_per_second
        return max(0.0, max(self.num_bytes) - idle_bytes) / self.num_steps


class HostsSide(Side):
    """A side with as many workers on each host; it counts what they send.

    Args:
        bed: `TwoHosts`, entered.
        name: String, for people.
        module: String, the module that each worker runs.
        setup: Dict, what the workers are told.
        workers_per_host: Int.
        python: String or `None`, the interpreter. Defaults to this one.
    """

    def __init__(
        self,
        bed: TwoHosts,
        name: str,
        module: str,
        setup: Mapping[str, Any],
        workers_per_host: int,
        python: str | None = None,
    ) -> None:
        self.name = name
        self.blocks: dict[str, list[Block]] = {}
        self._bed = bed
        addresses = bed.worker_addresses(workers_per_host)
        commands = worker_commands(module, setup, addresses, python)
        entered = [
            [*bed.enter(rank // workers_per_host), *command]
            for rank, command in enumerate(commands)
        ]
        self._start(entered, _environment())

    def run(self, variant: str, steps: int) -> Any:
        """Run a block of steps, as a `Side` does, and read the counters around it."""
        begin, before = time.perf_counter(), self._bed.bytes_sent()
        results = super().run(variant, steps)
        there, back = (
            end - start
            for end, start in zip(self._bed.bytes_sent(), before, strict=True)
        )
        block = Block(steps, time.perf_counter() - begin, (there, back))
        self.blocks.setdefault(variant, []).append(block)
        return results

    def bytes_per_step(
        self, variant: str, num_blocks: int, idle_bytes_per_second: float
    ) -> list[float]:
        """Bytes per step and direction of the last blocks of a variant."""
        blocks = self.blocks[variant][-num_blocks:]
        return [block.bytes_per_step(idle_bytes_per_second) for block in blocks]


def idle_bytes_per_second(bed: TwoHosts) -> float:
    """Traffic of the link while all sides wait: heartbeats and the like."""
    before = bed.bytes_sent()
    time.sleep(_IDLE_SECONDS)
    after = bed.bytes_sent()
    sent = [end - begin for end, begin in zip(after, before, strict=True)]
    return max(sent) / _IDLE_SECONDS


def utilisations(
    bytes_per_step: list[float], seconds: list[float], bits_per_second: float
) -> list[float]:
    """The share of the link's rate that each block used, in one direction."""
    pairs = zip(bytes_per_step, seconds, strict=True)
    return [8 * sent / (taken * bits_per_second) for sent, taken in pairs]


def in_megabytes(num_bytes: list[float]) -> float:
    """The median, in units of 2**20 bytes."""
    return round(statistics.median(num_bytes) / 2**20, 2)


def _environment() -> dict[str, str]:
    """The environment of a worker, less proxies: no way leads out of a host."""
    kept = worker_environment().items()
    return {
        # Or Gloo listens where the machine's name points to, outside of the bed.
        "GLOO_SOCKET_IFNAME": INTERFACE,
        **{name: value for name, value in kept if not name.lower().endswith("_proxy")},
    }


def make_sides(
    bed: TwoHosts, workers_per_host: int, setup: dict
) -> tuple[HostsSide, HostsSide]:
    """The workers of tfdp and those of the stock strategy."""
    module = "tools.bench.hosts_worker"
    sides = []
    for name, variants in (
        ("tfdp", tfdp_variants(workers_per_host)),
        ("stock", STOCK_VARIANTS),
    ):
        told = {**setup, "strategy": name, "variants": variants}
        sides.append(HostsSide(bed, name, module, told, workers_per_host))
    ours, stock = sides
    return ours, stock
