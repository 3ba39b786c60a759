"""Time per global sample with gradient accumulation: two workers and one device."""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report

STEPS = 8  # micro-batches of an update
NUM_WORKERS = 2
# A micro-batch. The bytes of an update do not depend on it, so that a small one is
# the hard case; 32 takes eight times as long.
BATCH_SIZE = 4
# Blocks, relative to what the command line says: a block takes seconds.
SHARE_OF_BLOCKS = 0.5


def run(args: Arguments) -> None:
    """Measure the transformer.

    One device is timed as two processes that do the same, each by itself, at the
    same time: alone, it would have the caches, the memory and the clock of the
    whole machine, which two workers share.
    """
    setting = {
        "benchmark": f"micro-batches with accumulation over {STEPS}, GradientTape loop "
        f"with Adam, {NUM_WORKERS} workers, 1 thread each, against one device with 1 "
        f"thread, of which {NUM_WORKERS} run at the same time",
        "model": "character transformer, 6 blocks of width 512, sequence length 64, "
        "19.1 million parameters",
        "batch": f"{BATCH_SIZE} for each replica, {STEPS} micro-batches a block",
    }
    report = Report(args, setting)
    setup = {"model": "transformer", "accumulation_steps": STEPS}
    setup["batch_size"] = BATCH_SIZE
    ours, alone = (
        Side(
            name,
            "tools.bench.accumulation_worker",
            {**setup, "strategy": name},
            num_workers=NUM_WORKERS,
        )
        for name in ("tfdp", "alone")
    )
    with started(ours, alone):
        times = alternate(
            [(ours, "micro-batch"), (alone, "micro-batch")],
            blocks=max(3, round(args.blocks * SHARE_OF_BLOCKS)),
            # Of so many in a row one communicates, wherever they begin.
            steps=STEPS,
            warm_up=STEPS,
        )
    report.add_times(times)
    per_sample = {
        "tfdp": [t / (NUM_WORKERS * BATCH_SIZE) for t in times["tfdp/micro-batch"]],
        "alone": [t / BATCH_SIZE for t in times["alone/micro-batch"]],
    }
    ratio = paired_ratio(per_sample["tfdp"], per_sample["alone"])
    name = "time per global sample of 2 workers relative to one device"
    report.add(Figure(name, ratio, at_most=0.6))
    report.finish()
