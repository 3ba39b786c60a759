"""The table of a comparison: how fast each side was, and tfdp relative to it."""

from __future__ import annotations

import dataclasses
import statistics

from tfdp.bench.stats import Ratio, paired_ratio, ratio_to_best

PACKS_MB = (1, 4, 25)
OURS, STOCK, STOCK_BEST = "tfdp", "stock, defaults", "stock, best pack size"
DDP, DDP_TUNED = "DDP, defaults", "DDP, tuned"
COLUMNS = (
    *("model", "side", "step\n(ms)", "samples/s", "speed of tfdp\n/ its speed"),
    "95 %\ninterval",
)
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        model: String.
        side: String.
        step_seconds: Float, the median.
        samples_per_second: Float, of all workers together.
        speed_of_tfdp: `Ratio` of this side's time to that of tfdp, or `None` for
            tfdp itself.
        note: String, what else to know.
    """

    model: str
    side: str
    step_seconds: float
    samples_per_second: float
    speed_of_tfdp: Ratio | None
    note: str = ""


def rows_of(model: str, times: Times, global_batch_size: int) -> list[Row]:
    """The lines of one model.

    Args:
        model: String, its name.
        times: Dict from `side/arm` to seconds per step, block by block.
        global_batch_size: Int, samples of a step.

    Returns:
        List of `Row`, tfdp first.
    """
    ours = times[f"tfdp/{model}"]
    packs = {f"packs of {mb} MB": f"stock/{model}, packs of {mb} MB" for mb in PACKS_MB}
    best = min(packs, key=lambda name: statistics.median(times[packs[name]]))
    rivals = [times[arm] for arm in packs.values()]
    found: list[tuple[str, list[float], Ratio | None, str]] = [
        (OURS, ours, None, ""),
        (STOCK, times[f"stock/{model}"], None, ""),
        (STOCK_BEST, times[packs[best]], ratio_to_best(rivals, ours), best),
    ]
    if f"ddp/{model}" in times:
        found.append((DDP, times[f"ddp/{model}"], None, ""))
        found.append((DDP_TUNED, times[f"ddp/{model}, tuned"], None, ""))
    rows = []
    for side, seconds, ratio, note in found:
        if side != OURS and ratio is None:
            ratio = paired_ratio(seconds, ours)
        middle = statistics.median(seconds)
        rows.append(Row(model, side, middle, global_batch_size / middle, ratio, note))
    return rows


def cells(row: Row) -> list[str]:
    """The line as it is printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
    ratio = row.speed_of_tfdp
    return [
        row.model,
        row.side + (f" ({row.note})" if row.note else ""),
        f"{1e3 * row.step_seconds:.2f}",
        f"{row.samples_per_second:.0f}",
        f"{ratio.median:.3f}" if ratio else "",
        ratio.interval if ratio else "",
    ]
