"""The update itself: DistributedOptimizer's fused one against Keras's own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tfdp.launch.bench.sides import Side, alternate, paired_ratio, started
from tools.bench.report import Arguments, Figure, Report

LAYERS = "50 layers of 64 units with LayerNormalization, 200 variables"
SMALL = "200 variables of 64 to 4,096 values, each of another size"
LARGE = "20 variables of 1,048,576 values"
# What is compared, with the goal for the speed relative to Keras.
GOALS = {
    (LAYERS, "Adam"): 1.5,
    (SMALL, "Adam"): 1.5,
    (SMALL, "Adam, weight decay, global_clipnorm"): None,
    (LARGE, "Adam"): 1.0,
}
KINDS = ("keras", "tfdp", "xla", "nothing")
STEPS = {LAYERS: 50, SMALL: 50, LARGE: 5}


def run(args: Arguments) -> None:
    """Measure Adam in a `tf.function` that does nothing else.

    Calling a function that captures so many variables takes a good part of that
    time, whatever it does with them. So the update itself is compared too: what is
    left when the time of a function that does nothing with them is taken off.
    """
    setting = {
        "benchmark": "one update by `optimizer.apply` in a tf.function, one "
        "CPU device, no strategy, TensorFlow's own choice of threads",
    }
    report = Report(args, setting)
    side = Side("update", "tools.bench.update_worker", {})
    with started(side):
        for (variables, optimizer), goal in GOALS.items():
            what = f"{optimizer}, {variables}"
            kinds = {kind: f"{kind}: {what}" for kind in KINDS}
            times = alternate(
                [(side, variant) for variant in kinds.values()],
                blocks=args.blocks,
                steps=STEPS[variables],
            )
            report.add_times(times)
            keras, tfdp, xla, nothing = (times[f"update/{a}"] for a in kinds.values())
            ratio = paired_ratio(keras, tfdp)
            report.add(Figure(f"{what}: speed relative to Keras", ratio, at_least=goal))
            name = f"{what}: time of Keras's compiled by XLA relative to tfdp's"
            report.add(Figure(name, paired_ratio(xla, tfdp)))
            ratio = paired_ratio(without(nothing, keras), without(nothing, tfdp))
            name = f"{what}: the same without the call"
            report.add(Figure(name, ratio, at_least=goal))
    report.finish()


def without(call: Sequence[float], times: Sequence[float]) -> list[float]:
    """Times less the median time of a call."""
    median = statistics.median(call)
    return [value - median for value in times]
