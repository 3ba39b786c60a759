"""Step time of `fit` with oneDNN's kernels relative to TensorFlow's own, on CPUs.

With ONEDNN_MAX_CPU_ISA=AVX2 oneDNN has what it has on a processor without AVX-512,
where TensorFlow leaves it off. TensorFlow's own kernels use AVX on either.
"""

from __future__ import annotations

from tfdp.launch.bench.sides import Side, alternate_for, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report
from tools.bench.xla_worker import BATCH_SIZES, UNITS

ROWS = ("8", "32", "256")
OTHERS = ("cnn", "transformer", "lstm", "embedding")
MODELS = (*(f"mlp-{size}-{rows}" for size in UNITS for rows in ROWS), *OTHERS)
MODULE = "tools.bench.xla_worker"
# Of a block, of the slowest variant.
SECONDS = 1.0
# What has oneDNN's kernels, beside what has TensorFlow's own. The second pair is what
# `tfdp run -n 1` changes for a user of plain Keras.
PAIRS = {
    1: (("plain", "plain"), ("one", "plain"), ("two", "two")),
    2: (("workers", "workers"),),
}
WHO = {
    "plain": "plain Keras",
    "one": "one replica",
    "two": "two devices",
    "workers": "two workers",
}


def run(args: Arguments) -> None:
    """Measure `fit` of several models, alone, on two devices and on two workers."""
    setting = {
        "benchmark": "Keras fit with TF_ENABLE_ONEDNN_OPTS=1 and 0, CPU, Adam",
        "models": "mlp-MILLIONS-ROWS: two hidden layers; the CNN and the transformer "
        "of `xla`; an LSTM of 128 units over 64 steps; an embedding of 50,000 rows",
        "batch": {"rows of each replica": {name: BATCH_SIZES[name] for name in OTHERS}},
    }
    report = Report(args, setting)
    for model in args.models:
        for num_workers in PAIRS:
            _measure(report, args.blocks, model, num_workers)
    report.finish()


def _measure(report: Report, blocks: int, model: str, num_workers: int) -> None:
    own, onednn = (
        Side(
            f"oneDNN {value}",
            MODULE,
            {"strategy": "tfdp"},
            num_workers,
            environment={"TF_ENABLE_ONEDNN_OPTS": value},
        )
        for value in "01"
    )
    with started(own, onednn):
        for with_it, without in PAIRS[num_workers]:
            names = [f"{model}/{who}/no jit" for who in (without, with_it)]
            variants = list(zip((own, onednn), names, strict=True))
            times = alternate_for(SECONDS, variants, blocks=blocks)
            report.add_times(times)
            without_times, with_times = (
                times[f"{side.name}/{variant}"] for side, variant in variants
            )
            beside = "without" if with_it == without else f"{WHO[without]} without"
            name = (
                f"{model}, {WHO[with_it]}: step time with oneDNN relative to {beside}"
            )
            report.add(
                Figure(name, paired_ratio(with_times, without_times), at_most=1.02)
            )
