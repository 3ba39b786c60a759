"""One TensorFlow process of `hosts_compression`, a strategy for each variant."""

from __future__ import annotations

from typing import Any

from tfdp.launch.bench.channel import Variants, timed, work
from tfdp.launch.bench.training import make_strategy, training_step
from tools.bench.barrier import barrier
from tools.bench.models import MODELS


def compressions() -> dict[str, Any]:
    """The option of each variant."""
    from tfdp.compression import BlockQuantized, PowerSGD, TopK

    return {
        "hierarchical": None,
        "bf16": {"outer": "bf16"},
        "int8": {"outer": "int8"},
        "int4": {"outer": BlockQuantized(bits=4)},
        # No step that is timed is one of the first, which are not compressed. Across
        # nodes only, gradients would be summed inside of them first, for nothing.
        "PowerSGD": PowerSGD(rank=4, start_step=0),
        "TopK": {"outer": TopK(ratio=0.01)},
    }


def make_variants(setup: dict[str, Any]) -> Variants:
    """A training step for each compression."""
    import tfdp

    first = make_strategy({**setup, "strategy": "tfdp"})
    known, variants = compressions(), {}
    for name in setup["variants"]:
        options = tfdp.CommunicationOptions(
            algorithm="hierarchical", compression=known[name]
        )
        # The process has its server now, and its number of threads.
        strategy = tfdp.MultiWorkerMirroredStrategy(communication=options)
        step = training_step(
            strategy, MODELS[setup["model"]], batch_size=setup["batch_size"]
        )
        variants[name] = timed(step, barrier(first))
    return variants


if __name__ == "__main__":
    work(make_variants)
