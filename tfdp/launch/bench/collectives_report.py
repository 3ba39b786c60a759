"""Table and plot of `tfdp bench collectives`: bus bandwidth by size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdp.launch.bench.nccl_tests import NO_ALGORITHM, Row
from tfdp.launch.bench.output import new_figure, save

COLUMNS = (
    *("collective", "algorithm", "size\n(B)", "count", "type", "time\n(us)"),
    *("algbw\n(GB/s)", "busbw\n(GB/s)", "#wrong"),
)
_UNITS = ((2**30, "GB"), (2**20, "MB"), (2**10, "KB"), (1, "B"))


def plot(rows: Sequence[Row], num_replicas: int, caption: str, path: Path) -> None:
    """Draw the table.

    Args:
        rows: Sequence of `Row`.
        num_replicas: Int, number of replicas.
        caption: String, the machine and the versions.
        path: Path of the PNG file.
    """
    dtype = rows[0].dtype
    title = f"Collectives between {num_replicas} replicas, {dtype}"
    figure, axes = new_figure(title, caption)
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
    save(figure, path)


def size_text(num_bytes: int) -> str:
    """A size in a unit that fits.

    Args:
        num_bytes: Int.

    Returns:
        String.

    Example:

    >>> size_text(65536), size_text(3 * 2**19)
    ('64 KB', '1.5 MB')
    """
    factor, unit = next(u for u in _UNITS if num_bytes >= u[0] or u[0] == 1)
    return f"{num_bytes / factor:.3g} {unit}"


def cells(row: Row) -> list[str]:
    """Cells of the line, as printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
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
