"""Steps that XLA compiles in several clusters, cut at buckets' ends, against one."""

from __future__ import annotations

from tfdp.bench.sides import Side, alternate_for, started
from tfdp.bench.stats import paired_ratio
from tools.bench.hosts_bed import TwoHosts, missing
from tools.bench.hosts_sides import RATE_OF_START, HostsSide
from tools.bench.report import Arguments, Figure, Report

# Numbers of clusters of a model, at most as many as it has buckets. The CNN of
# `tools.bench.xla` has one bucket.
MODELS = {
    "mlp": (2, 3),
    "deep mlp": (2, 4),
    "deep mlp, large batches": (2, 4),
    "transformer": (2,),
}
CLUSTERS = " clusters"
MODULE = "tools.bench.xla_worker"
# Of a block, of the slowest arm.
SECONDS = 0.7


def run(args: Arguments) -> None:
    """Measure `fit` with one and more clusters, on one machine and on two hosts."""
    setting = {
        "benchmark": "Keras fit with jit_compile=True, the forward and backward pass "
        "as one XLA cluster and cut into several at buckets' ends, Adam",
        "models": "MLP of 1.9 million parameters, MLP of 5 million, also with 512 "
        "samples for each replica, transformer of two blocks of width 128, as in `xla`",
    }
    report = Report(args, setting)
    setup = {"strategy": "tfdp"}
    two = Side("fit", MODULE, setup, num_workers=2)
    _measure(report, two, "workers", "two workers", args.blocks)
    if reason := missing():
        print(f"Two hosts are left out: {reason}")
    else:
        _measure_hosts(report, setup, args)
    report.finish()


def _measure_hosts(report: Report, setup: dict, args: Arguments) -> None:
    """Measure two workers with a link between them that takes no processor's time."""
    with TwoHosts(RATE_OF_START) as bed:
        side = HostsSide(bed, "fit", MODULE, setup, 1)
        with started(side):
            for rate in args.rates:
                bed.set_rate(rate)
                _measure_started(
                    report, side, "workers", f"two hosts at {rate}", args.blocks
                )


def _measure(report: Report, side: Side, who: str, where: str, blocks: int) -> None:
    with started(side):
        _measure_started(report, side, who, where, blocks)


def _measure_started(
    report: Report, side: Side, who: str, where: str, blocks: int
) -> None:
    for model, numbers in MODELS.items():
        arms = [f"{model}/{who}/{number}{CLUSTERS}" for number in (1, *numbers)]
        times = alternate_for(SECONDS, [(side, arm) for arm in arms], blocks=blocks)
        report.add_times({f"{where}: {name}": found for name, found in times.items()})
        whole, *cut = (times[f"fit/{arm}"] for arm in arms)
        for number, found in zip(numbers, cut, strict=True):
            what = f"{model}, {where}: {number} clusters relative to one"
            report.add(Figure(what, paired_ratio(found, whole)))
