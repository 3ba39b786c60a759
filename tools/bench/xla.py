"""Steps that XLA compiles: against plain Keras, compiled too, and without XLA."""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, alternate_for, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report
from tools.bench.xla_worker import BATCH_SIZES

MODELS = ("mlp", "cnn", "transformer")
MODULE = "tools.bench.xla_worker"
# Of a block, of the slowest variant.
SECONDS = 1.0
# One replica and plain Keras are nearly as fast: more pairs tell them apart.
PAIRS_FOR_A_BLOCK = 5


def run(args: Arguments) -> None:
    """Measure `fit` of three models with and without `jit_compile=True`."""
    setting = {
        "benchmark": "Keras fit with and without jit_compile=True, CPU devices of one "
        "process, Adam",
        "models": "MLP of 1.9 million parameters with BatchNormalization; CNN of four "
        "convolutions on 32 x 32 images; transformer of two blocks of width 128",
        "batch": ", ".join(
            f"{BATCH_SIZES[name]} samples of {name}" for name in args.models
        )
        + " for each replica",
    }
    report = Report(args, setting)
    for model in args.models:
        _measure_one(report, model, PAIRS_FOR_A_BLOCK * args.blocks)
        _measure_devices(report, model, args.blocks)
        _measure_workers(report, model, args.blocks)
    report.finish()


def _measure_one(report: Report, model: str, blocks: int) -> None:
    """Measure what tfdp costs one replica, whose step is compiled as a whole."""
    side = Side("fit", MODULE, {})
    variants = [(side, f"{model}/{who}/jit") for who in ("one", "plain")]
    with started(side):
        times = alternate_for(SECONDS, variants, blocks=blocks)
    report.add_times({f"alone, {name}": found for name, found in times.items()})
    ratio = paired_ratio(*(times[f"fit/{variant}"] for _, variant in variants))
    name = f"{model}, one replica, compiled: step time relative to plain Keras compiled"
    report.add(Figure(name, ratio, at_most=1.03))


def _measure_devices(report: Report, model: str, blocks: int) -> None:
    who = ("plain", "one", "two")
    side = Side("fit", MODULE, {})
    times = _times(report, side, model, who, blocks)
    named = zip(who, ("plain Keras", "one replica", "two replicas"), strict=True)
    for each, what in named:
        ratio = paired_ratio(times[each, "jit"], times[each, "no jit"])
        report.add(Figure(f"{model}, {what}: compiled relative to not", ratio))
    # Two replicas have twice the samples in a step.
    of_a_sample = [seconds / 2 for seconds in times["two", "jit"]]
    ratio = paired_ratio(of_a_sample, times["plain", "jit"])
    name = f"{model}, two replicas, compiled: time of a sample"
    report.add(Figure(f"{name} relative to plain Keras compiled", ratio))


def _measure_workers(report: Report, model: str, blocks: int) -> None:
    """Measure two processes: also what is lost where no reduction overlaps."""
    side = Side("fit", MODULE, {"strategy": "tfdp"}, num_workers=2)
    times = _times(report, side, model, ("workers", "one bucket"), blocks)
    overlapped = times["workers", "no jit"]
    ratio = paired_ratio(times["workers", "jit"], overlapped)
    report.add(Figure(f"{model}, two workers: compiled relative to not", ratio))
    ratio = paired_ratio(times["one bucket", "no jit"], overlapped)
    name = f"{model}, two workers, not compiled: all reduced after the backward pass"
    report.add(Figure(f"{name}, relative to during it", ratio))


def _times(
    report: Report, side: Side, model: str, who: tuple[str, ...], blocks: int
) -> dict[tuple[str, str], list[float]]:
    keys = [(each, how) for each in who for how in ("jit", "no jit")]
    variants = [(side, f"{model}/{each}/{how}") for each, how in keys]
    with started(side):
        times = alternate_for(SECONDS, variants, blocks=blocks)
    report.add_times(times)
    return {key: times[f"fit/{model}/{'/'.join(key)}"] for key in keys}
