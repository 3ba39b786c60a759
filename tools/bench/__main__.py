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
    all_reduce,
    ddp,
    growth,
    single,
    step,
    update,
    wrapping,
)

BENCHMARKS = {
    "single": single.run,
    "all-reduce": all_reduce.run,
    "step": step.run,
    "ddp": ddp.run,
    "growth": growth.run,
    "accumulation": accumulation.run,
    "update": update.run,
    "wrapping": wrapping.run,
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
        help="for `step`",
    )
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PATH",
        help="for `ddp`: an interpreter that has PyTorch",
    )
    args = parser.parse_args()
    if args.blocks < 1:
        parser.error(f"--blocks must be at least 1. Received: {args.blocks}")
    BENCHMARKS[args.benchmark](args)


if __name__ == "__main__":
    main()
