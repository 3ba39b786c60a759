"""Step time of a GradientTape loop on two workers, tfdp and stock."""

from __future__ import annotations

from tfdp.bench.sides import Side, alternate, started
from tfdp.bench.stats import paired_ratio, ratio_to_best
from tools.bench.report import Arguments, Figure, Report

PACKS_MB = (1, 2, 4, 8, 25)
# Steps in a block: long enough for the clock, short enough to take turns often.
STEPS = {"mlp": 20, "transformer": 1}
# Blocks, relative to what the command line says: a transformer's step is long.
SHARE_OF_BLOCKS = {"mlp": 1.0, "transformer": 0.3}


def run(args: Arguments) -> None:
    """Measure the models named on the command line."""
    setting = {
        "benchmark": "step of a GradientTape loop with SGD, 2 workers, 1 thread each",
        "models": ", ".join(args.models),
        "batch": "32 for each worker",
    }
    report = Report(args, setting)
    packs = [mb * 2**20 for mb in PACKS_MB]
    setup = {"benchmark": "step", "models": args.models}
    sides = [
        Side(
            name,
            "tools.bench.worker",
            {**setup, "strategy": name, "pack_bytes": pack_bytes},
            num_workers=2,
        )
        for name, pack_bytes in (("tfdp", [0]), ("stock", [0, *packs]))
    ]
    with started(*sides):
        for model in args.models:
            _measure(report, sides, model, packs, args.blocks)
    report.finish()


def _measure(
    report: Report, sides: list[Side], model: str, packs: list[int], blocks: int
) -> None:
    ours, stock = sides
    alone = f"{model}, no communication"
    arms = [(ours, model), (ours, alone), (stock, model)]
    arms += [(stock, f"{model}, packs of {pack}") for pack in packs]
    times = alternate(
        arms,
        blocks=max(3, round(blocks * SHARE_OF_BLOCKS[model])),
        steps=STEPS[model],
    )
    report.add_times(times)
    tfdp, defaults = times[f"tfdp/{model}"], times[f"stock/{model}"]
    report.add(
        Figure(
            f"{model}, speed relative to stock's defaults",
            paired_ratio(defaults, tfdp),
            at_least=1.4,
        )
    )
    packed = [values for name, values in times.items() if "packs" in name]
    report.add(
        Figure(
            f"{model}, speed relative to stock at its best pack size",
            ratio_to_best(packed, tfdp),
            at_least=1.0,
            note=f"packs of {PACKS_MB} MB tried",
        )
    )
    report.add(
        Figure(
            f"{model}, speed of a step without any communication relative to "
            "stock's defaults",
            paired_ratio(defaults, times[f"tfdp/{alone}"]),
            note="what free communication would give",
        )
    )
