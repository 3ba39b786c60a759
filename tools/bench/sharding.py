"""Step time and memory with sharded optimizer state, against the same without."""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.models import MODELS
from tools.bench.report import Arguments, Figure, Report

NUM_WORKERS = (2, 4)
# A small batch: what is compared is the reduction and the update.
BATCH_SIZE = 4
SHARE_OF_BLOCKS = 0.5
_SLACK_BYTES = 64 * 2**10


def run(args: Arguments) -> None:
    """Measure the transformer with Adam."""
    setting = {
        "benchmark": "step of a GradientTape loop with Adam, 1 thread for each worker, "
        "optimizer state sharded (ZeRO-1) and not",
        "model": str(MODELS["transformer"]),
        "batch": f"{BATCH_SIZE} for each worker",
    }
    report = Report(args, setting)
    for num_workers in NUM_WORKERS:
        _measure(report, num_workers, max(3, round(args.blocks * SHARE_OF_BLOCKS)))
    report.finish()


def _measure(report: Report, num_workers: int, blocks: int) -> None:
    setup = {
        "strategy": "tfdp",
        "model": "transformer",
        "batch_size": BATCH_SIZE,
        "accumulation_steps": 1,
    }
    whole, sharded = (
        Side(
            name,
            "tools.bench.sharding_worker",
            {**setup, "sharding": name},
            num_workers=num_workers,
        )
        for name in ("none", "optimizer")
    )
    with started(whole, sharded):
        _report_memory(report, whole, sharded, num_workers)
        if num_workers > NUM_WORKERS[0]:
            return
        times = alternate(
            [(whole, "step"), (sharded, "step")], blocks=blocks, steps=2, warm_up=3
        )
    report.add_times(times)
    ratio = paired_ratio(times["optimizer/step"], times["none/step"])
    name = f"{num_workers} workers: step time relative to unsharded"
    report.add(Figure(name, ratio, at_most=1.05))


def _report_memory(
    report: Report, whole: Side, sharded: Side, num_workers: int
) -> None:
    """Of the worker that holds most, right after the optimizer was built."""
    total = max(whole.run("slots", 1))
    own = max(sharded.run("slots", 1))
    share = (own - _SLACK_BYTES) / (total / num_workers)
    note = f"{own / 1e6:.2f} MB of {total / 1e6:.2f} MB"
    name = f"{num_workers} workers: slots less 64 KB, relative to an N-th of all"
    report.add(Figure(name, share, at_most=1.02, note=note))
    predicted = max(whole.run("predicted", 1)) - max(sharded.run("predicted", 1))
    pairs = zip(whole.run("resident", 1), sharded.run("resident", 1), strict=True)
    fallen = min(before - after for before, after in pairs)
    note = f"{fallen / 1e6:.1f} MB of {predicted / 1e6:.1f} MB predicted"
    name = f"{num_workers} workers: memory saved relative to what was predicted"
    report.add(Figure(name, fallen / predicted, at_least=0.8, note=note))
