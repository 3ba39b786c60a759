"""Arms of the benchmarks on two hosts, and rates of their link."""

from __future__ import annotations

from typing import Any

from tools.bench.hosts_bed import TwoHosts
from tools.bench.hosts_sides import HostsSide

RATES = ("200mbit", "1gbit")
# The goals are for a link slow enough to be the bottleneck, not the processors.
RATE_OF_GOALS = "200mbit"
# While all sides send their models to the other host at once, heartbeats wait behind
# them in the same connections, and give up after some seconds.
RATE_OF_START = "10gbit"
TFDP_ARMS: dict[str, dict[str, Any]] = {
    "ring": {"algorithm": "ring"},
    "hierarchical": {"algorithm": "hierarchical"},
    "hierarchical bf16": {"algorithm": "hierarchical", "compression": "bf16"},
}
STOCK_ARMS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "packs of 8 MB": {"pack_bytes": 8 * 2**20},
}


def make_sides(
    bed: TwoHosts, workers_per_host: int, setup: dict
) -> tuple[HostsSide, HostsSide]:
    """The workers of tfdp and those of the stock strategy."""
    module = "tools.bench.hosts_worker"
    sides = []
    for name, arms in (("tfdp", TFDP_ARMS), ("stock", STOCK_ARMS)):
        told = {**setup, "strategy": name, "arms": arms}
        sides.append(HostsSide(bed, name, module, told, workers_per_host))
    ours, stock = sides
    return ours, stock
