"""A row of the whole cluster as named numbers, for tables and plots."""

from __future__ import annotations

from collections.abc import Sequence

from tfdp.monitor.windows import Row

VALUES = (
    "step_seconds",
    "p50_seconds",
    "p95_seconds",
    "p99_seconds",
    "samples_per_second",
    "input_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_seconds",
    "communication_fraction",
    "bytes_sent",
    "busbw_bytes_per_second",
    "gradient_norm",
    "loss_scale",
    "skipped_steps",
)


def names(num_workers: int, labels: Sequence[str]) -> list[str]:
    """The columns of a run, in order.

    Args:
        num_workers: Int.
        labels: Sequence of strings, what the collectives of a step are for.

    Returns:
        List of strings.

    Example:

    >>> names(1, ["bucket 0"])[-4:]
    ['straggler', 'worker0_step_seconds', 'worker0_wait_seconds', 'bucket0_seconds']
    """
    workers = [
        f"worker{rank}_{what}_seconds"
        for rank in range(num_workers)
        for what in ("step", "wait")
    ]
    return [
        "step",
        "epoch",
        *VALUES,
        "straggler",
        *workers,
        *(of_label(label) for label in labels),
    ]


def of_label(label: str) -> str:
    """The column of a label."""
    return f"{label.replace(' ', '')}_seconds"


def values_of(row: Row, straggler: int | None) -> dict[str, float]:
    """The numbers of a row, by column.

    Args:
        row: `Row`.
        straggler: Int, the rank of the worker that the others wait for, or `None`.

    Returns:
        Dict from column to number.
    """
    found: dict[str, float] = {"step": row.step, "epoch": row.epoch, **row.values}
    if straggler is not None:
        found["straggler"] = straggler
    for rank, wait in row.waits().items():
        found[f"worker{rank}_step_seconds"] = row.workers[rank].mean.step_seconds
        found[f"worker{rank}_wait_seconds"] = wait
    for label, seconds in row.buckets.items():
        found[of_label(label)] = seconds
    return found
