"""Table and plot of `models`: time, payload and bandwidth by algorithm."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdp.ground.base.intervals import median_interval
from tfdp.ground.plans.topology import Topology
from tfdp.ground.text import pluralize
from tfdp.launch.bench.nccl_tests import algorithm_bandwidth, bus_factor
from tfdp.launch.bench.output import COLOURS, new_figure, save
from tools.bench.link_rate import bits_per_second
from tools.bench.published_models import PublishedModel

_MB = 2**20
_HATCHES = ("", "///", "...")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: one model by one algorithm on one backend.

    Args:
        model: String.
        algorithm: String.
        backend: String.
        seconds: Float, the median of the blocks.
        interval: Pair of floats, its 95 % interval.
        model_bytes: Int, size of the gradients.
        bucket_bytes: Tuple of ints, sizes of the buckets in the order of launch.
        payload_bytes: Int, what a replica sends in an iteration by the plan, the mean
            of all.
        payload_ratio: Float, that divided by 2 (N - 1) / N times the model's bytes.
        tcp_bytes: Float, what a worker's TCP connections have sent in an iteration,
            the mean of all; what goes through shared memory is not in it.
        algbw_gb_per_second: Float.
        busbw_gb_per_second: Float.
        share_of_link: Float, the least time that the links between nodes allow,
            divided by `seconds`; or `None` where their rate is not known.
        num_wrong: Int, wrong elements on all replicas together.
    """

    model: str
    algorithm: str
    backend: str
    seconds: float
    interval: tuple[float, float]
    model_bytes: int
    bucket_bytes: tuple[int, ...]
    payload_bytes: int
    payload_ratio: float
    tcp_bytes: float
    algbw_gb_per_second: float
    busbw_gb_per_second: float
    share_of_link: float | None
    num_wrong: int


def row_of(
    model: PublishedModel,
    route: str,
    topology: Topology,
    times: Sequence[float],
    counts: Sequence[Mapping[str, Any]],
    link_rate: str | None,
) -> Row:
    """The line of what was measured.

    Args:
        model: `PublishedModel`.
        route: String, `algorithm/backend`.
        topology: `Topology` of the replicas.
        times: Sequence of floats, the seconds of each block.
        counts: Sequence of dicts, what each worker counted.
        link_rate: String or `None`, rate of a node's link.

    Returns:
        `Row`.
    """
    algorithm, backend = route.split("/")
    first = counts[0]
    seconds = statistics.median(times)
    factor = bus_factor("all_reduce", topology.num_replicas)
    bandwidth = algorithm_bandwidth(model.num_bytes, seconds)
    share = None
    if link_rate is not None:
        share = least_seconds(model.num_bytes, topology.num_nodes, link_rate) / seconds
    return Row(
        model=model.name,
        algorithm=algorithm,
        backend=backend,
        seconds=seconds,
        interval=median_interval(times),
        model_bytes=model.num_bytes,
        bucket_bytes=tuple(first["bucket_bytes"]),
        payload_bytes=first["payload_bytes"],
        payload_ratio=first["payload_bytes"] / (factor * model.num_bytes),
        tcp_bytes=statistics.fmean(count["tcp_bytes"] for count in counts),
        algbw_gb_per_second=bandwidth,
        busbw_gb_per_second=factor * bandwidth,
        share_of_link=share,
        num_wrong=sum(count["num_wrong"] for count in counts),
    )


def least_seconds(num_bytes: int, num_nodes: int, link_rate: str) -> float:
    """The least time of an all-reduce between nodes, whatever the algorithm.

    The nodes have to send 2 (H - 1) / H of the data each, in the mean, as H members
    of an all-reduce, however many replicas they have.

    Args:
        num_bytes: Int, size of the data.
        num_nodes: Int, H.
        link_rate: String, rate of the link of each node in each direction.

    Returns:
        Float, seconds.

    Example:

    >>> least_seconds(125_000_000, 2, "1gbit")
    1.0

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", section 3.
    """
    sent_bytes = bus_factor("all_reduce", num_nodes) * num_bytes
    return 8 * sent_bytes / bits_per_second(link_rate)


def _interval(row: Row) -> str:
    low, high = (1e3 * limit for limit in row.interval)
    return f"[{low:.1f}, {high:.1f}]"


def _share(row: Row) -> str:
    return "-" if row.share_of_link is None else f"{row.share_of_link:.3f}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "algorithm": lambda row: row.algorithm,
    "backend": lambda row: row.backend,
    "time\n(ms)": lambda row: f"{1e3 * row.seconds:.1f}",
    "95 %\ninterval": _interval,
    "payload\n(MB)": lambda row: f"{row.payload_bytes / _MB:.1f}",
    "/ ideal": lambda row: f"{row.payload_ratio:.3f}",
    "TCP\n(MB)": lambda row: f"{row.tcp_bytes / _MB:.1f}",
    "algbw\n(GB/s)": lambda row: f"{row.algbw_gb_per_second:.3f}",
    "busbw\n(GB/s)": lambda row: f"{row.busbw_gb_per_second:.3f}",
    "of link": _share,
    "#wrong": lambda row: str(row.num_wrong),
}


def notes(
    models: Sequence[PublishedModel], rows: Sequence[Row], link_rate: str | None
) -> list[str]:
    """What is said below the table.

    Args:
        models: Sequence of `PublishedModel`.
        rows: Sequence of `Row`.
        link_rate: String or `None`, rate of a node's link.

    Returns:
        List of strings.
    """
    buckets = {row.model: row.bucket_bytes for row in rows}  # the same on all routes
    lines = [f"{model}; {buckets_text(buckets[model.name])}" for model in models]
    lines += [
        "Payload: what a replica sends in an iteration, by the plan; ideal: "
        "2 (N - 1) / N times the model's bytes.",
        "TCP: what a worker's connections sent in one, as the kernel counts it; "
        "workers of one host use shared memory for direct and mpi.",
    ]
    if link_rate:
        lines.append(
            f"Of link: the least time that {link_rate} between nodes allow, divided by "
            "the time."
        )
    return lines


def buckets_text(sizes: Sequence[int]) -> str:
    """Number and sizes of buckets in words.

    Args:
        sizes: Sequence of ints, bytes.

    Returns:
        String.

    Example:

    >>> buckets_text([2**20, 3 * 2**19, 2**24])
    '3 buckets of 1 to 16 MB'
    """
    ends = " to ".join(f"{size / _MB:.3g}" for size in (min(sizes), max(sizes)))
    return f"{pluralize(len(sizes), 'bucket')} of {ends} MB"


def plot(num_replicas: int, rows: Sequence[Row], caption: str, path: Path) -> None:
    """Draw the bus bandwidth of each algorithm and backend, model by model.

    Args:
        num_replicas: Int, number of replicas.
        rows: Sequence of `Row`.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    title = f"Gradients of published models between {num_replicas} replicas"
    figure, axes = new_figure(title, caption)
    models = list(dict.fromkeys(row.model for row in rows))
    routes = list(dict.fromkeys((row.algorithm, row.backend) for row in rows))
    algorithms = list(dict.fromkeys(row.algorithm for row in rows))
    backends = list(dict.fromkeys(row.backend for row in rows))
    width = 0.8 / len(routes)
    for index, route in enumerate(routes):
        algorithm, backend = route
        own = [row for row in rows if (row.algorithm, row.backend) == route]
        shift = (index - (len(routes) - 1) / 2) * width
        axes.bar(
            [models.index(row.model) + shift for row in own],
            [row.busbw_gb_per_second for row in own],
            0.9 * width,
            color=COLOURS[algorithms.index(algorithm)],
            hatch=_HATCHES[backends.index(backend)],
            edgecolor="white",
            label=f"{algorithm}, {backend}",
        )
    axes.set_xticks(range(len(models)), models)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("bus bandwidth (busbw), GB/s")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.legend(ncols=3, loc="upper left", frameon=False)
    save(figure, path)
