"""Steps that XLA compiles: against plain Keras, compiled too, and without XLA."""

from __future__ import annotations

from tfdp.bench.sides import Side, alternate_for, started
from tfdp.bench.stats import paired_ratio
from tools.bench.report import Arguments, Figure, Report

MODELS = ("mlp", "cnn", "transformer")
# Samples of a replica.
BATCH_SIZES = {"mlp": 32, "cnn": 16, "transformer": 8}
# Of a block, of the slowest arm.
SECONDS = 1.0


def run(args: Arguments) -> None:
    """Measure `fit` of three models with and without `jit_compile=True`."""
    setting = {
        "benchmark": "Keras fit with and without jit_compile=True, CPU devices of one "
        "process, Adam",
        "models": "MLP of 1.9 million parameters with BatchNormalization; CNN of four "
        "convolutions on 32 x 32 images; transformer of two blocks of width 128",
        "batch": ", ".join(f"{n} samples of {name}" for name, n in BATCH_SIZES.items())
        + " for each replica",
    }
    report = Report(args, setting)
    for model in MODELS:
        side = Side("fit", "tools.bench.xla_worker", {})
        arms = [
            (side, f"{model}/{who}/{how}")
            for who in ("plain", "one", "two")
            for how in ("jit", "no jit")
        ]
        with started(side):
            times = alternate_for(SECONDS, arms, blocks=args.blocks)
        report.add_times(times)
        jit = {who: times[f"fit/{model}/{who}/jit"] for who in ("plain", "one", "two")}
        ratio = paired_ratio(jit["one"], jit["plain"])
        name = f"{model}, one replica, compiled: step time relative to plain Keras's"
        report.add(Figure(f"{name} compiled one", ratio, at_most=1.03))
        for who, what in (("plain", "plain Keras"), ("one", "one"), ("two", "two")):
            ratio = paired_ratio(jit[who], times[f"fit/{model}/{who}/no jit"])
            name = what if who == "plain" else f"{what} replica{'s' * (who == 'two')}"
            report.add(Figure(f"{model}, {name}: compiled relative to not", ratio))
    report.finish()
