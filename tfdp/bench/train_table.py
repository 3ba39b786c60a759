"""The table of scaling: time, speed and efficiency for each number of replicas."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from tfdp.bench.scaling import speedup
from tfdp.bench.stats import Ratio

COLUMNS = (
    *("model", "scaling", "replicas", "batch", "step\n(ms)", "samples/s", "speedup"),
    *("efficiency", "95 %\ninterval"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        model: String.
        scaling: String.
        num_replicas: Int.
        batch_size: Int, of each replica.
        step_seconds: Float, the median.
        samples_per_second: Float, of all replicas together.
        speedup: `Ratio` to one replica.
        efficiency: `Ratio`.
    """

    model: str
    scaling: str
    num_replicas: int
    batch_size: int
    step_seconds: float
    samples_per_second: float
    speedup: Ratio
    efficiency: Ratio


def row_of(
    what: tuple[str, str],
    count: int,
    batch_size: int,
    times: Sequence[float],
    share: Ratio,
) -> Row:
    """The line of one number of replicas.

    Args:
        what: Tuple of strings, the model and the scaling.
        count: Int, number of replicas.
        batch_size: Int, of each.
        times: Sequence of floats, seconds of a step, block by block.
        share: `Ratio`, the efficiency.

    Returns:
        A `Row`.
    """
    seconds = statistics.median(times)
    return Row(
        *what,
        num_replicas=count,
        batch_size=batch_size,
        step_seconds=seconds,
        samples_per_second=batch_size * count / seconds,
        speedup=speedup(share, count),
        efficiency=share,
    )


def cells(row: Row) -> list[str]:
    """The line as it is printed.

    Args:
        row: `Row`.

    Returns:
        List of strings, one for each of `COLUMNS`.
    """
    return [
        row.model,
        row.scaling,
        str(row.num_replicas),
        str(row.batch_size),
        f"{1e3 * row.step_seconds:.2f}",
        f"{row.samples_per_second:.0f}",
        f"{row.speedup.median:.2f}",
        f"{row.efficiency.median:.3f}",
        row.efficiency.interval,
    ]
