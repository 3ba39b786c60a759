"""`tfdp bench collectives`: time and bandwidth of each collective and algorithm."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdp.ground.base.memory import free_bytes
from tfdp.ground.plans.topology import Topology
from tfdp.launch.bench import output
from tfdp.launch.bench.nccl_tests import (
    BACKEND,
    MAX_REPLICAS_OF,
    NO_ALGORITHM,
    Row,
    algorithm_bandwidth,
    bus_factor,
    padded_bytes,
)
from tfdp.launch.bench.replicas import ReplicaSettings, ready_replicas
from tfdp.launch.bench.sides import Runner, alternate_for

# Sizes are given in bytes, so the benchmark supports the dtypes whose bytes per element
# are listed here; they are the choices of `--dtype`.
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4}
# Blocks are short, so a change of the machine's load affects all algorithms alike. A
# block of the slowest one takes this many seconds; blocks of the others have the same
# number of calls.
_BLOCK_SECONDS = 0.1
_WORKER = "tfdp.launch.bench.collectives_worker"
COLUMNS: dict[str, Callable[[Row], str]] = {
    "collective": lambda row: row.collective,
    "algorithm": lambda row: row.algorithm,
    "size\n(B)": lambda row: str(row.size_bytes),
    "count": lambda row: str(row.count),
    "type": lambda row: row.dtype,
    "time\n(us)": lambda row: f"{1e6 * row.seconds:.1f}",
    "algbw\n(GB/s)": lambda row: f"{row.algbw_gb_per_second:.3f}",
    "busbw\n(GB/s)": lambda row: f"{row.busbw_gb_per_second:.3f}",
    "#wrong": lambda row: str(row.num_wrong),
}
_UNITS = ((2**30, "GB"), (2**20, "MB"), (2**10, "KB"), (1, "B"))


@dataclasses.dataclass(frozen=True)
class Settings(ReplicaSettings):
    """Settings of `tfdp bench collectives`.

    Args:
        collectives: Sequence of strings from
            `tfdp.launch.bench.nccl_tests.COLLECTIVES`.
        algorithms: Sequence of strings, algorithms of the all-reduce.
        sizes: Sequence of ints, sizes of the tensors in bytes.
        dtype: String, a key of `ITEM_BYTES`.
        blocks: Int, number of times that a block of calls is timed for each algorithm.
        num_workers: Int, number of local processes, or `None` for the cluster that this
            process belongs to. Defaults to `None`.
        devices_per_worker: Int, logical CPU devices of each worker, or `None` for one.
            Defaults to `None`.
        node_size: Int, number of replicas that count as one node, or `None` for the
            real nodes. Defaults to `None`.
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
        """`ReplicaSettings.worker_setup` with `"dtype"` and `"communication"` added."""
        setup = {"dtype": self.dtype, "communication": {"node_size": self.node_size}}
        return {**super().worker_setup, **setup}

    def check(self, topology: Topology) -> None:
        """Check that the replicas can run these settings.

        Args:
            topology: `Topology` of the replicas.

        Raises:
            ValueError: If there are too few replicas or nodes for an algorithm, too
                many replicas for exact sums in `dtype`, or too little memory.
        """
        super().check(topology)
        count = topology.num_replicas
        if count > MAX_REPLICAS_OF.get(self.dtype, count):
            raise ValueError(
                f"Sums over this number of replicas are not exact in {self.dtype}. "
                f"Received: {count} replicas"
            )
        largest, free = max(self.sizes), free_bytes()
        needed = self._needed_bytes(largest, count)
        if needed > free:
            raise ValueError(
                f"Tensors of this size, with what their check needs, take "
                f"{needed / 2**30:,.1f} GB, but {free / 2**30:,.1f} GB of memory are "
                f"free; give smaller ones by --sizes or --max-bytes. "
                f"Received: {size_text(largest)}"
            )

    def _needed_bytes(self, size: int, num_replicas: int) -> int:
        """Return the least memory, in bytes, that the replicas of this machine need.

        A worker that checks a result computes the expected one from the inputs of all
        replicas, as integers of 64 bits.

        Args:
            size: Int, bytes of a tensor.
            num_replicas: Int, number of replicas, of all workers.
        """
        elements = size // ITEM_BYTES[self.dtype]
        if self.num_workers is None:  # this machine may have only one replica
            return 2 * size + 8 * elements * num_replicas
        return 2 * size * num_replicas + 8 * elements * num_replicas * self.num_workers


def num_blocks(settings: Settings) -> int:
    """Return the number of timed blocks of a run, the length of its progress bar.

    Args:
        settings: `Settings` of the run.

    Returns:
        Int, over all collectives, algorithms and sizes.
    """
    variants = sum(len(_algorithms(settings, c)) for c in settings.collectives)
    return variants * len(settings.sizes) * settings.blocks


def measure(
    settings: Settings,
    runner: Runner,
    num_replicas: int,
    on_block: Callable[[], Any] = lambda: None,
) -> tuple[list[Row], dict[str, list[float]]]:
    """Time and check all collectives; the algorithms of one size alternate.

    Args:
        settings: `Settings` of the run.
        runner: `Runner` of the variants in `tfdp.launch.bench.collectives_worker`.
        num_replicas: Int, number of replicas.
        on_block: Callable, called after each block. Defaults to nothing.

    Returns:
        Tuple of the list of `Row`, and a dict from the name of a measured variant,
        `collective/algorithm/bytes`, to the seconds per call in each of its blocks.
    """
    rows: list[Row] = []
    all_times: dict[str, list[float]] = {}
    item = ITEM_BYTES[settings.dtype]
    for collective in settings.collectives:
        for requested_size in settings.sizes:
            size = padded_bytes(requested_size, item, num_replicas)
            names = {
                algorithm: f"{collective}/{algorithm}/{size}"
                for algorithm in _algorithms(settings, collective)
            }
            variants = [(runner, name) for name in names.values()]
            times = alternate_for(
                _BLOCK_SECONDS, variants, blocks=settings.blocks, on_block=on_block
            )
            for algorithm, name in names.items():
                all_times[name] = seconds = times[f"{runner.name}/{name}"]
                wrong = sum(runner.run(f"check {name}", 1))
                case = (collective, algorithm, size)
                rows.append(_row(settings, case, num_replicas, seconds, wrong))
    return rows, all_times


def _row(
    settings: Settings,
    case: tuple[str, str, int],
    num_replicas: int,
    times: list[float],
    wrong: int,
) -> Row:
    """Return the results of one collective, algorithm and size.

    Args:
        settings: `Settings` of the run.
        case: Tuple of the collective, the algorithm and the size in bytes.
        num_replicas: Int, number of replicas.
        times: List of floats, seconds per call in each block.
        wrong: Int, number of wrong elements on all replicas together.
    """
    collective, algorithm, size = case
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
    """Return the names of the algorithms with which a collective is measured.

    They are those of `settings` for `"all_reduce"`. Other collectives have no choice of
    algorithms: the only name is `NO_ALGORITHM`.
    """
    return settings.algorithms if collective == "all_reduce" else (NO_ALGORITHM,)


def run(settings: Settings, files: output.Files) -> int:
    """Measure the collectives, print the table, and write the files of results.

    Args:
        settings: `Settings` of the run.
        files: `Files` to write.

    Returns:
        Int, number of wrong elements in all results together.

    Raises:
        ValueError: If the replicas cannot run the settings.
        RuntimeError: If a worker fails.
    """
    content = output.about("collectives", dataclasses.asdict(settings))
    with (
        output.progress_bar("collectives", num_blocks(settings)) as on_block,
        ready_replicas(settings, _WORKER) as replicas,
    ):
        count = replicas.topology.num_replicas
        rows, times = measure(settings, replicas.runner, count, on_block)
        (backend, *_) = replicas.runner.run(BACKEND, 1)
    if replicas.is_chief:
        output.report(
            {**content, "num_replicas": count, "backend": backend, "seconds": times},
            files,
            rows,
            COLUMNS,
            functools.partial(_plot, count),
            heading=f"collectives between {count} replicas, by {backend}",
        )
    return sum(row.num_wrong for row in rows)


def _plot(num_replicas: int, rows: Sequence[Row], caption: str, path: Path) -> None:
    """Plot bus bandwidth over size, with a line for each collective and algorithm.

    Args:
        num_replicas: Int, number of replicas, for the title.
        rows: Sequence of `Row`, the table.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    dtype = rows[0].dtype
    title = f"Collectives between {num_replicas} replicas, {dtype}"
    figure, axes = output.new_figure(title, caption)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        name = row.collective.replace("_", "-")
        name += "" if row.algorithm == NO_ALGORITHM else f", {row.algorithm}"
        lines.setdefault(name, []).append(row)
    for name, points in lines.items():
        points.sort(key=lambda row: row.size_bytes)
        sizes = [row.size_bytes for row in points]
        axes.plot(sizes, [row.busbw_gb_per_second for row in points], label=name)
    sizes = sorted({row.size_bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_text(size) for size in sizes], minor=False)
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (busbw), GB/s")
    axes.legend(frameon=False)
    output.save(figure, path)


def size_text(num_bytes: int) -> str:
    """Format a size with a suitable unit.

    Args:
        num_bytes: Int, the size in bytes.

    Returns:
        String, the size in units of 1024.

    Example:

    >>> size_text(65536), size_text(3 * 2**19)
    ('64 KB', '1.5 MB')
    """
    factor, unit = next(u for u in _UNITS if num_bytes >= u[0] or u[0] == 1)
    return f"{num_bytes / factor:.3g} {unit}"
