"""Advice: one sentence that recommends how to make a run faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdp.features.monitor.windows import Straggler
from tfdp.ground.base.context import strategy_of
from tfdp.ground.plans.gathers import StepGathers

# Fractions of a step: exposed communication below the first, and waiting for data below
# the second, get no advice, since there is little to gain.
_LITTLE, _MUCH_INPUT = 0.1, 0.25
# A collective below both limits, of bytes and of seconds, is mostly latency. If a small
# collective takes longer, its link is slow, and fewer collectives would not help.
_SMALL_BYTES, _SHORT_SECONDS = 2**20, 0.01


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a run that advice depends on, besides its times.

    Args:
        num_replicas: Int, number of replicas on all workers.
        num_nodes: Int, number of nodes.
        num_buckets: Int, number of all-reduces of gradients in a step.
        gradient_bytes: Int, size in bytes of the gradients that they reduce.
        compression: Bool, whether gradients are compressed.
        accumulates: Bool, whether an update takes several micro-batches.
        num_gathers: Int, number of tensors that a step gathers or sums over replicas
            for operations that need the whole batch. Defaults to 0.
        gathered_bytes: Int, size in bytes of these tensors. Defaults to 0.
        largest_gather: String, description of the largest tensor. Defaults to `""`.
    """

    num_replicas: int
    num_nodes: int
    num_buckets: int
    gradient_bytes: int
    compression: bool
    accumulates: bool
    num_gathers: int = 0
    gathered_bytes: int = 0
    largest_gather: str = ""


def advise(
    totals: Mapping[str, float], facts: Facts, straggler: Straggler | None
) -> str:
    """Recommend one change that would make a run faster.

    It concerns a straggler, if there is one; else waiting for data, if it takes more
    than 25 % of a step and more than exposed communication does; else exposed
    communication.

    Args:
        totals: Mapping, `RunTotals.values` of the run.
        facts: `Facts` of the run.
        straggler: `Straggler` of the run, or `None`.

    Returns:
        String, one sentence; it says so if there is nothing to recommend.
    """
    if facts.num_replicas == 1:
        return "There is one replica: nothing is communicated."
    if not totals["sent_bytes"] or math.isnan(totals["exposed_seconds"]):
        return (
            "No collective was timed: on CPUs that needs a traced step, not "
            "`run_eagerly=True`, and on GPUs epochs of more than five steps."
        )
    step = totals["step_seconds"]
    waits = totals["input_seconds"] / step
    exposed = totals["exposed_seconds"] / step
    if straggler is not None:
        text = str(straggler)
        return f"{text[0].upper()}{text[1:]}: {straggler.remedy}."
    if waits > max(exposed, _MUCH_INPUT):
        return (
            f"{waits:.0%} of the step passes before it has its data: prefetch, cache, "
            "or give the input pipeline more threads."
        )
    if exposed < _LITTLE:
        return (
            f"The step is bound by compute: {exposed:.0%} of it is exposed "
            "communication, so there is little to gain from less of it."
        )
    over = "over nodes" if facts.num_nodes > 1 else "between the replicas"
    return (
        f"{exposed:.0%} of the step is exposed communication {over}: "
        f"{_remedy(exposed, totals['communication_seconds'], facts)}."
    )


def _remedy(exposed: float, seconds: float, facts: Facts) -> str:
    """Recommend a change against exposed communication, as a clause.

    Args:
        exposed: Float, exposed communication as a fraction of a step.
        seconds: Float, communication time of a step.
        facts: `Facts` of the run.
    """
    num_buckets = max(1, facts.num_buckets)
    if facts.gathered_bytes > facts.gradient_bytes:
        return (
            "gathers for operations that need the whole batch have more bytes than the "
            f"gradients, the largest {facts.largest_gather}; see docs/one_program.md"
        )
    mean_bytes, mean_seconds = facts.gradient_bytes / num_buckets, seconds / num_buckets
    is_latency = mean_bytes < _SMALL_BYTES and mean_seconds < _SHORT_SECONDS
    if is_latency and facts.num_buckets > 1:
        return (
            f"{facts.num_buckets} collectives of {mean_bytes / 1e6:.2g} MB are mostly "
            "latency, and larger buckets would need fewer"
        )
    # bf16 halves the bytes, and two micro-batches halve the number of exchanges. Each
    # of these changes saves about half of the exposed communication.
    saved = f"would save about {exposed / 2:.1g} of it"
    steps = "accumulating gradients over two micro-batches"
    if not is_latency and not facts.compression:
        return f"bf16 compression {saved}, and {steps} as much"
    if not facts.accumulates:
        return f"{steps} {saved}"
    return "a larger batch on each replica would communicate less often"


def facts_of(model: Any) -> Facts:
    """Return the properties of a model's run that advice depends on.

    Args:
        model: Keras model that has been trained.
    """
    strategy = strategy_of(model)
    optimizer = model.optimizer
    steps = getattr(optimizer, "accumulation_steps", 1)
    if strategy is None:
        return Facts(1, 1, 0, 0, compression=False, accumulates=steps > 1)
    try:
        plan = strategy.communication_plan(model)
        num_buckets, num_bytes = len(plan.buckets), plan.num_bytes
    # A model that only ran eagerly has no communication plan, since the shapes of its
    # inputs are unknown.
    except ValueError:
        num_buckets = num_bytes = 0
    gathers = strategy.extended.step_gathers.get(model, {}).get("fit", StepGathers())
    largest = gathers.largest
    return Facts(
        num_replicas=strategy.num_replicas_in_sync,
        num_nodes=strategy.extended.algorithm_selector.topology.num_nodes,
        num_buckets=num_buckets,
        gradient_bytes=num_bytes,
        compression=strategy.extended.options.compression is not None,
        accumulates=steps > 1,
        num_gathers=len(gathers.gathers),
        gathered_bytes=gathers.num_bytes,
        largest_gather="" if largest is None else largest[1].describe(gathers.rows),
    )


def settings_of(model: Any, every: int) -> dict[str, Any]:
    """Return the settings of a run, for its JSON file.

    Args:
        model: Keras model that was trained.
        every: Int, steps of a window.

    Returns:
        Dict of `every`, the names of the model, the strategy and the backend, the
        hosts, and the versions of TensorFlow and Keras.
    """
    strategy = strategy_of(model)
    return {
        "every": every,
        "model": model.name,
        "strategy": type(model.distribute_strategy).__name__,
        "backend": strategy.extended.group.backend if strategy else "none",
        "hosts": list(strategy.extended.hosts) if strategy else ["localhost"],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def loss_scale_of(optimizer: Any) -> tuple[float, int]:
    """Return the current loss scale, and the number of skipped steps.

    Args:
        optimizer: Keras optimizer, or `None`.

    Returns:
        Tuple of a float, NaN without a loss scale, and an int.
    """
    scale = getattr(optimizer, "loss_scale", None)
    if scale is None:
        dynamic = getattr(optimizer, "dynamic_scale", None)
        scale = math.nan if dynamic is None else float(dynamic.numpy())
    return float(scale), int(getattr(optimizer, "skipped_steps", 0) or 0)
