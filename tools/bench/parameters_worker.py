"""One worker that trains a transformer at one or several stages of sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdp.launch.bench.channel import OnDemand, Variant, Variants, work
from tfdp.launch.bench.models import Model
from tfdp.launch.bench.training import make_strategy, training_step
from tools.bench.all_reduce import BUCKETS
from tools.bench.barrier import barrier
from tools.bench.meters import metered, peak_bytes, peak_of, reset_peak, resident_bytes

OPTIMIZERS = {"adam": "Adam", "sgd": "SGD"}


@dataclasses.dataclass
class Trained:
    """A training step, and what was seen when its model was made.

    Args:
        step: Callable that takes the step and returns the loss.
        optimizer: `DistributedOptimizer`.
        start_bytes: Int, the peak of resident memory while it was built.
    """

    step: Callable[[], Any]
    optimizer: Any
    start_bytes: int


def trained(strategy: Any, setup: dict[str, Any], options: dict[str, Any]) -> Trained:
    """Build a model and its optimizer.

    Args:
        strategy: A tfdp strategy.
        setup: Dict with a `model`, the name of an `optimizer` and a `batch_size`.
        options: Dict, arguments of `DistributedOptimizer`, and of the strategy's
            scope an `init`.
    """
    import keras

    from tfdp.training.optimizer.distributed import DistributedOptimizer

    reset_peak()
    given = dict(options)
    init = given.pop("init", None)
    made: list[Any] = []

    def make_optimizer() -> Any:
        inner = getattr(keras.optimizers, OPTIMIZERS[setup["optimizer"]])(1e-3)
        made.append(DistributedOptimizer(inner, **given))
        return made[0]

    step = training_step(
        strategy,
        Model(**setup["model"]),
        make_optimizer=make_optimizer,
        batch_size=setup["batch_size"],
        init=init,
    )
    return Trained(step, made[0], peak_bytes())


def memory_variants(strategy: Any, setup: dict[str, Any]) -> dict[str, Variant]:
    """Peaks of resident memory of one stage, and the sizes of its units."""
    _send_once(strategy)
    found = trained(strategy, setup, setup["options"])

    def step() -> None:
        found.step().numpy()

    return {
        "start": lambda steps: found.start_bytes,
        "step": peak_of(step),
        "resident": lambda steps: resident_bytes(),
        "largest unit": lambda steps: largest_unit_bytes(found.optimizer),
    }


def _send_once(strategy: Any) -> None:
    """Let the transport take the memory that it keeps, whatever the model."""
    import tensorflow as tf

    def replica() -> Any:
        values = [tf.zeros([length]) for length in BUCKETS]
        sums = tf.distribute.get_replica_context().all_reduce("SUM", values)
        return tf.add_n([total[0] for total in sums])

    step = tf.function(lambda: strategy.run(replica))
    strategy.experimental_local_results(step())[0].numpy()


def largest_unit_bytes(optimizer: Any) -> int:
    """The size of the largest unit of sharded parameters, or 0 where all are whole."""
    from tfdp.training.parameters.sharded_parameter import sharded_parameter

    parts = optimizer.shards.parts.values() if optimizer.is_sharded else ()
    parameters = [sharded_parameter(v) for part in parts for v in part.variables]
    units = {id(p.unit): p.unit for p in parameters if p is not None}
    return max((unit_bytes(unit) for unit in units.values()), default=0)


def unit_bytes(unit: Any) -> int:
    """The size of a unit's parameters, gathered."""
    return sum(p.num_elements * p.dtype.size for p in unit.parameters)


def time_variants(strategy: Any, setup: dict[str, Any]) -> OnDemand[Variant]:
    """Step times, and bytes that a replica sends in a step, of several stages."""
    meet = barrier(strategy)
    told = setup["variants"]
    sent: dict[str, float] = {}

    def make(name: str) -> Variant:
        stage, _, what = name.partition("/")
        if what == "bytes":
            return lambda steps: sent[stage]
        found = trained(strategy, setup, told[stage])
        sent[stage] = _sent_bytes(found.step)
        return metered(found.step, lambda loss: loss.numpy(), lambda: meet().numpy())

    return OnDemand(make, lambda name: "all")


def _sent_bytes(step: Any) -> float:
    """Trace a step once more, and count what the first replica sends in one."""
    import tensorflow as tf

    from tfdp.communication.collectives.timing import Recorder

    with Recorder() as recorder:
        # Clocks are in this graph, not in the one that is timed.
        tf.function(step.python_function).get_concrete_function()
    return sum(c.wire_bytes for c in recorder.collectives if c.replica == 0)


def make_variants(setup: dict[str, Any]) -> Variants:
    strategy = make_strategy(setup)
    variants_of = memory_variants if setup["benchmark"] == "memory" else time_variants
    return variants_of(strategy, setup)


if __name__ == "__main__":
    work(make_variants)
