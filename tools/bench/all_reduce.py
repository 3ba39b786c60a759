"""Bandwidth and latency of all-reduce between two processes, tfdp and stock."""

from __future__ import annotations

import statistics

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report, ratio_to_best

MB = 2**20
BUCKETS = [25 * MB // 4] * 4  # floats
SMALL = [1024]  # 4 KB
PACKS_MB = (1, 2, 4, 8, 25)


def run(args: Arguments) -> None:
    """Measure 100 MB in 25 MB buckets and 4 KB."""
    report = Report(
        args, {"benchmark": "all-reduce, 2 workers on loopback, float32, 1 thread each"}
    )
    large = {"100 MB": (BUCKETS, 0)}
    packed = {f"100 MB, packs of {mb} MB": (BUCKETS, mb * MB) for mb in PACKS_MB}
    small = {"4 KB": (SMALL, 0)}
    ours = Side(
        "tfdp",
        "tools.bench.worker",
        {"strategy": "tfdp", "variants": {**large, **small}},
        num_workers=2,
    )
    stock = Side(
        "stock",
        "tools.bench.worker",
        {"strategy": "stock", "variants": {**large, **packed, **small}},
        num_workers=2,
    )
    with started(ours, stock):
        variants = [(ours, "100 MB"), *((stock, name) for name in {**large, **packed})]
        times = alternate(variants, blocks=args.blocks, steps=2)
        times |= alternate(
            [(ours, "4 KB"), (stock, "4 KB")], blocks=3 * args.blocks, steps=100
        )
    report.add_times(times)
    tfdp = times["tfdp/100 MB"]
    _add_large(report, times, tfdp)
    ratio = paired_ratio(times["stock/4 KB"], times["tfdp/4 KB"])
    report.add(Figure("4 KB, speed relative to stock", ratio, at_least=1.0))
    report.finish()


def _add_large(report: Report, times: dict, tfdp: list[float]) -> None:
    bandwidth = 100 * MB / 1e9 / statistics.median(tfdp)
    report.add(Figure("100 MB, tfdp, GB/s", round(bandwidth, 3)))
    ratio = paired_ratio(times["stock/100 MB"], tfdp)
    name = "100 MB, bandwidth relative to stock's defaults"
    report.add(Figure(name, ratio, at_least=2.0, note="target 2.5"))
    best = ratio_to_best([v for k, v in times.items() if "packs" in k], tfdp)
    name = "100 MB, bandwidth relative to stock at its best pack size"
    report.add(Figure(name, best, at_least=1.0, note=f"packs of {PACKS_MB} MB tried"))
