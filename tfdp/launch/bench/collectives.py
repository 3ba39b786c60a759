"""`tfdp bench collectives`: time and bandwidth of every collective and algorithm."""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench import output
from tfdp.launch.bench.collectives_report import COLUMNS, cells, plot
from tfdp.launch.bench.local_replicas import check_topology, local_topology
from tfdp.launch.bench.nccl_tests import (
    BACKEND,
    MOST_REPLICAS_OF,
    NO_ALGORITHM,
    Row,
    algorithm_bandwidth,
    bus_factor,
    padded_bytes,
)
from tfdp.launch.bench.sides import Runner, Side, alternate_for, started

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4}
_BLOCK_SECONDS = 0.1
_WORKER = "tfdp.launch.bench.collectives_worker"


class Found(NamedTuple):
    """What was measured, and on what.

    Args:
        rows: List of `Row`.
        seconds: Dict from names to the seconds of each block.
        num_replicas: Int.
        backend: String, what carried the bytes.
        is_chief: Bool, whether this process reports.
    """

    rows: list[Row]
    seconds: dict[str, list[float]]
    num_replicas: int
    backend: str
    is_chief: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the measurement.

    Args:
        collectives: Sequence of strings, of `tfdp.launch.bench.nccl_tests.COLLECTIVES`.
        algorithms: Sequence of strings, of the all-reduce.
        sizes: Sequence of ints, bytes.
        dtype: String, a key of `ITEM_BYTES`.
        blocks: Int, turns of each algorithm.
        num_workers: Int, local processes, or `None` for the cluster that this
            process is in. Defaults to `None`.
        devices_per_worker: Int, logical CPU devices of each, or `None`. Defaults
            to `None`.
        node_size: Int, replicas that count as one node, or `None`. Defaults to
            `None`.
    """

    collectives: Sequence[str]
    algorithms: Sequence[str]
    sizes: Sequence[int]
    dtype: str
    blocks: int
    num_workers: int | None = None
    devices_per_worker: int | None = None
    node_size: int | None = None

    @property
    def worker_setup(self) -> dict[str, Any]:
        """Setup of a worker."""
        return {
            "strategy": "tfdp" if (self.num_workers or 0) > 1 else "auto",
            "devices": self.devices_per_worker,
            "dtype": self.dtype,
            "communication": {"node_size": self.node_size},
        }

    @property
    def topology(self) -> Topology:
        """The replicas of the local processes, by node."""
        return local_topology(self.num_workers, self.devices_per_worker, self.node_size)

    def check(self, topology: Topology) -> None:
        """Check that all that is asked for can be run.

        Args:
            topology: `Topology` of the replicas.

        Raises:
            ValueError: If not.
        """
        check_topology(topology, self.algorithms)
        count = topology.num_replicas
        if count > MOST_REPLICAS_OF.get(self.dtype, count):
            raise ValueError(
                f"The sums of so many replicas are not exact in {self.dtype}. "
                f"Received: {count} replicas"
            )


def num_turns(settings: Settings) -> int:
    """Number of blocks of a run.

    Args:
        settings: `Settings`.

    Returns:
        Int.
    """
    arms = sum(len(_algorithms(settings, c)) for c in settings.collectives)
    return arms * len(settings.sizes) * settings.blocks


def measure(
    settings: Settings,
    runner: Runner,
    num_replicas: int,
    on_turn: Callable[[], Any] = lambda: None,
) -> tuple[list[Row], dict[str, list[float]]]:
    """Run everything; the algorithms of one size take turns.

    Args:
        settings: `Settings`.
        runner: A `Side` of `tfdp.launch.bench.collectives_worker`, or `ClusterRunner`.
        num_replicas: Int, number of replicas.
        on_turn: Callable, called after each block. Defaults to nothing.

    Returns:
        Tuple of the rows, and the seconds of each block by name.
    """
    rows: list[Row] = []
    all_times: dict[str, list[float]] = {}
    item = ITEM_BYTES[settings.dtype]
    for collective in settings.collectives:
        for asked in settings.sizes:
            size = padded_bytes(asked, item, num_replicas)
            names = {
                algorithm: f"{collective}/{algorithm}/{size}"
                for algorithm in _algorithms(settings, collective)
            }
            times = _times_of(settings, runner, list(names.values()), on_turn)
            all_times |= times
            for algorithm, name in names.items():
                wrong = sum(runner.run(f"check {name}", 1))
                what = (collective, algorithm, size)
                rows.append(_row(settings, what, num_replicas, times[name], wrong))
    return rows, all_times


def _times_of(
    settings: Settings, runner: Runner, names: list[str], on_turn: Callable[[], Any]
) -> Mapping[str, list[float]]:
    arms = [(runner, name) for name in names]
    times = alternate_for(_BLOCK_SECONDS, arms, blocks=settings.blocks, on_turn=on_turn)
    return {name: times[f"{runner.name}/{name}"] for name in names}


def _row(
    settings: Settings,
    what: tuple[str, str, int],
    num_replicas: int,
    times: list[float],
    wrong: int,
) -> Row:
    collective, algorithm, size = what
    seconds = statistics.median(times)
    bandwidth = algorithm_bandwidth(size, seconds)
    return Row(
        collective=collective,
        algorithm=algorithm,
        size_bytes=size,
        count=size // ITEM_BYTES[settings.dtype],
        dtype=settings.dtype,
        seconds=seconds,
        algbw_gb_per_second=bandwidth,
        busbw_gb_per_second=bandwidth * bus_factor(collective, num_replicas),
        num_wrong=wrong,
    )


def _algorithms(settings: Settings, collective: str) -> Sequence[str]:
    return settings.algorithms if collective == "all_reduce" else (NO_ALGORITHM,)


def run(settings: Settings, files: output.Files) -> int:
    """Measure, print the table and write the files.

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
    found = measured(settings)
    rows, count = found.rows, found.num_replicas
    if found.is_chief:
        console = output.new_console()
        console.print(f"collectives between {count} replicas, by {found.backend}")
        content |= {
            "num_replicas": count,
            "backend": found.backend,
            "rows": [dataclasses.asdict(row) for row in rows],
            "seconds": found.seconds,
        }
        output.report(
            console,
            content,
            files,
            table=output.Table(COLUMNS, [cells(row) for row in rows]),
            draw=functools.partial(plot, rows, count),
        )
    return sum(row.num_wrong for row in rows)


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
        (backend, *_) = side.run(BACKEND, 1)
    return Found(rows, times, count, backend, is_chief=True)


def _measure_here(settings: Settings) -> Found:
    """Measure on the cluster of this process; the first worker reports."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdp.ground.options import CommunicationOptions
    from tfdp.launch.bench.collectives_worker import ClusterRunner, CollectiveArms
    from tfdp.training.strategy.strategy import auto_strategy

    options = CommunicationOptions(node_size=settings.node_size)
    strategy: Any = auto_strategy(communication=options)
    extended = strategy.extended
    settings.check(extended.algorithm_selector.topology)
    runner = ClusterRunner(strategy, CollectiveArms(strategy, settings.dtype))
    is_chief = extended.worker_group.is_chief
    count = extended.group.size
    with output.progress_bar("collectives", num_turns(settings)) as on_turn:
        rows, times = measure(settings, runner, count, on_turn)
    return Found(rows, times, count, extended.group.backend, is_chief)
