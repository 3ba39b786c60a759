"""Runs the benchmark of collectives on local workers, or in this process's cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

from tfdp.bench import output
from tfdp.bench.collectives import Row, Settings, measure, num_turns
from tfdp.bench.collectives_plot import plot
from tfdp.bench.sides import Side, started

_COLUMNS = (
    *("collective", "algorithm", "size\n(B)", "count", "type", "time\n(us)"),
    *("algbw\n(GB/s)", "busbw\n(GB/s)", "#wrong"),
)
_WORKER = "tfdp.bench.collectives_worker"


def run(settings: Settings, files: output.Files) -> int:
    """Measures, prints the table and writes the files.

    Args:
        settings: `Settings`.
        files: `Files` to write.

    Returns:
        Int, how many elements were wrong in all.

    Raises:
        ValueError: If what is asked for cannot be run.
        RuntimeError: If a worker fails.
    """
    content = output.about("collectives", dataclasses.asdict(settings))
    measured = _measure_here if settings.num_workers is None else _measure_on_workers
    rows, times, count, is_chief = measured(settings)
    if is_chief:
        console = output.new_console()
        console.print(f"collectives between {count} replicas")
        found = [dataclasses.asdict(row) for row in rows]
        content |= {"num_replicas": count, "rows": found, "seconds": times}
        output.report(
            console,
            content,
            files,
            table=output.Table(_COLUMNS, [_cells(row) for row in rows]),
            draw=functools.partial(plot, rows, count),
        )
    return sum(row.num_wrong for row in rows)


Found = tuple[list[Row], dict[str, list[float]], int, bool]


def _measure_on_workers(settings: Settings) -> Found:
    topology = settings.topology
    settings.check(topology)
    count = topology.num_replicas
    side = Side("workers", _WORKER, settings.worker_setup, settings.num_workers or 1)
    with (
        output.progress_bar("collectives", num_turns(settings)) as on_turn,
        started(side),
    ):
        rows, times = measure(settings, side, count, on_turn)
    return rows, times, count, True


def _measure_here(settings: Settings) -> Found:
    """Every worker of the cluster does the same; the first one reports."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdp.bench.collective_arms import CollectiveArms, Here
    from tfdp.options import CommunicationOptions
    from tfdp.strategy.strategy import auto_strategy

    options = CommunicationOptions(node_size=settings.node_size)
    strategy: Any = auto_strategy(communication=options)
    extended = strategy.extended
    settings.check(extended.algorithm_selector.topology)
    here = Here(strategy, CollectiveArms(strategy, settings.dtype))
    is_chief = extended.worker_group.rank == 0
    count = extended.group.size
    with output.progress_bar("collectives", num_turns(settings)) as on_turn:
        rows, times = measure(settings, here, count, on_turn)
    return rows, times, count, is_chief


def _cells(row: Row) -> list[str]:
    return [
        row.collective,
        row.algorithm,
        str(row.size_bytes),
        str(row.count),
        row.dtype,
        f"{1e6 * row.seconds:.1f}",
        f"{row.algbw_gb_per_second:.3f}",
        f"{row.busbw_gb_per_second:.3f}",
        str(row.num_wrong),
    ]
