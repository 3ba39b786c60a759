"""What cannot be combined with steps that do not wait for late workers."""

from __future__ import annotations

from typing import Any

from tfdp.ground.base.wrappers import other_optimizers, sharding_of
from tfdp.ground.text import pluralize
from tfdp.training.step.step import IndependentGroups


def check_model(strategy: Any, model: Any) -> None:
    """Raise `ValueError` if a model uses options that `backup_workers` excludes.

    These are options that need the gradients of all workers, such as sharding; that
    update after several steps; that train without synchronization; or that run eagerly.

    Args:
        strategy: The model's tfdp strategy.
        model: The Keras model.
    """
    optimizers = [model.optimizer, *other_optimizers(model).values()]
    features = [f for f in (getattr(o, "features", None) for o in optimizers) if f]
    needing = [
        f.label
        for each in features
        for f in each.active
        if f.needs_all_replicas or f.checks_finite or isinstance(f, IndependentGroups)
    ]
    found = {
        "`run_eagerly=True`": model.run_eagerly,
        "`tfdp run --rebalance`": strategy.extended.balance is not None,
        "sharding": any(sharding_of(each).shards_state for each in optimizers),
        "gradient accumulation": any(
            (getattr(o, "accumulation_steps", 1) or 1) != 1
            or getattr(o, "gradient_accumulation_steps", None)
            for o in optimizers
        ),
        **dict.fromkeys(needing, True),
    }
    if unsupported := [name for name, is_used in found.items() if is_used]:
        raise ValueError(
            "`backup_workers` drops the gradients of late workers, and does not "
            f"support {' and '.join(unsupported)}. Remove one of them."
        )


def check_workers(strategy: Any) -> None:
    """Check that a strategy's workers and backend support `backup_workers`.

    Args:
        strategy: A tfdp strategy.

    Raises:
        ValueError: If there are not more workers than `backup_workers`, or if the
            backend is not `"direct"`.
    """
    extended = strategy.extended
    number, spare = extended.worker_group.num_workers, extended.options.backup_workers
    if spare >= number:
        raise ValueError(
            "`backup_workers` must be less than the number of workers. Received: "
            f"backup_workers={spare}, {pluralize(number, 'worker')}"
        )
    if extended.group.transport.name != "direct":
        raise ValueError(
            '`backup_workers` is for `backend="direct"` between CPU workers. Received: '
            f"{extended.group.transport.name!r}"
        )
