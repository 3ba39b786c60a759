"""One worker that runs every all-reduce algorithm on tensors of several sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import Variant, Variants, timed, work
from tfdp.launch.bench.training import make_strategy
from tools.bench.barrier import barrier


def all_reduce_variant(strategy: Any, name: str, num_bytes: int) -> Variant:
    """Seconds of one all-reduce after another, begun by all workers together."""
    import tensorflow as tf

    from tfdp.ground.plans.traffic import Algorithm
    from tfdp.training.reduction.algorithm_selector import AlgorithmChoice

    group = strategy.extended.group
    all_reduce = AlgorithmChoice(Algorithm(name)).all_reduce
    value = tf.Variable(tf.ones([num_bytes // 4]))

    @tf.function(autograph=False)
    def step() -> Any:
        return all_reduce(value.read_value(), group, 0)[0]

    return timed(step, barrier(strategy))


def measured_links(strategy: Any) -> Callable[[int], Any]:
    """What a long `fit` measures at its start, and how long that takes."""
    from tfdp.training.reduction.link_measure import (
        LONG_RUN_STEPS,
        load_or_measure_links,
    )

    def run(steps: int) -> Any:
        del steps
        extended = strategy.extended
        extended.algorithm_selector.are_links_known = (
            False  # another rate since the last time
        )
        begin = time.perf_counter()
        name = f"a benchmark at {time.time()}"  # nothing is kept of it yet
        load_or_measure_links(
            extended.algorithm_selector,
            extended.group,
            extended.worker_group,
            name,
            LONG_RUN_STEPS,
        )
        seconds = time.perf_counter() - begin
        return {
            "links": dataclasses.asdict(extended.algorithm_selector.links),
            "seconds": seconds,
        }

    return run


def make_variants(setup: dict[str, Any]) -> Variants:
    strategy = make_strategy(setup)
    variants: dict[str, Any] = {"links": measured_links(strategy)}
    for name in setup["algorithms"]:
        for num_bytes in setup["sizes"]:
            variants[f"{name}/{num_bytes}"] = all_reduce_variant(
                strategy, name, num_bytes
            )
    return variants


if __name__ == "__main__":
    work(make_variants)
