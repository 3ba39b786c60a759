"""Measures one of the figures of docs/performance.md, as ratios in one run.

    python -m tools.bench NAME [--out FILE]

Both sides are alive at the same time and take turns, block by block. Run it on an
idle machine: a busy one makes the intervals wide.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.bench import (
    accumulation,
    algorithms,
    all_reduce,
    consistency,
    ddp,
    growth,
    hosts,
    hosts_step,
    monitor,
    rebalance,
    sharding,
    single,
    step,
    update,
    wrapping,
)
from tools.bench.hosts_arms import RATES
from tools.bench.hosts_bed import bits_per_second, missing

BENCHMARKS = {
    "single": single.run,
    "all-reduce": all_reduce.run,
    "algorithms": algorithms.run,
    "step": step.run,
    "ddp": ddp.run,
    "growth": growth.run,
    "accumulation": accumulation.run,
    "update": update.run,
    "sharding": sharding.run,
    "wrapping": wrapping.run,
    "monitor": monitor.run,
    "consistency": consistency.run,
    "rebalance": rebalance.run,
    "hosts": hosts.run,
    "hosts-step": hosts_step.run,
    "hosts-plan": algorithms.run_on_hosts,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--out", type=Path, help="write everything here as JSON")
    parser.add_argument(
        "--blocks", type=int, default=30, help="turns of each side, default 30"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=["mlp", "transformer"],
        default=["mlp", "transformer"],
        help="for `step`, `monitor` and `consistency`",
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PATH",
        help="for `ddp` and `hosts-step`: an interpreter that has PyTorch",
    )
    _add_hosts(parser)
    args = parser.parse_args()
    if args.blocks < 1:
        parser.error(f"--blocks must be at least 1. Received: {args.blocks}")
    if args.benchmark.startswith("hosts") and (lacks := missing()):
        parser.error(lacks)
    BENCHMARKS[args.benchmark](args)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("two hosts", "for `hosts...`")
    group.add_argument(
        "--rates", nargs="+", default=RATES, type=_rate, help="default 200mbit 1gbit"
    )
    group.add_argument(
        "--workers-per-host",
        nargs="+",
        type=_at_least_one,
        default=[2, 4],
        help="for `hosts`, default 2 4",
    )
    group.add_argument(
        "--megabytes", type=_at_least_one, default=64, help="for `hosts`, default 64"
    )
    group.add_argument(
        "--batch",
        type=_at_least_one,
        default=2,
        help="of each worker, for `hosts-step`, default 2",
    )


def _at_least_one(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return int(text)


def _rate(text: str) -> str:
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


if __name__ == "__main__":
    main()
