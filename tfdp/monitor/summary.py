"""What a monitor says at the end of training: a table and one sentence."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tfdp.monitor.windows import Totals


def summary_table(totals: Totals, hosts: Mapping[int, str], advice: str) -> str:
    """A run as a table.

    Args:
        totals: `Totals`, with at least one row.
        hosts: Mapping from rank to the name of a host.
        advice: String, one sentence.

    Returns:
        String of several lines.
    """
    values = totals.values
    step = values["step_seconds"]
    table = Table(title=f"Communication in {totals.num_steps} steps", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("note")
    table.add_row("step", _ms(step), _percentiles(values))
    if not math.isnan(values["samples_per_second"]):
        speed = f"{values['samples_per_second']:,.0f}"
        table.add_row("samples per second", speed, "of all replicas")
    for name in ("compute", "exposed", "input"):
        seconds = values[f"{name}_seconds"]
        table.add_row(_NAMES[name], _ms(seconds), f"{seconds / step:.0%} of the step")
    hidden = values["communication_seconds"] - values["exposed_seconds"]
    table.add_row(
        "communication, all",
        _ms(values["communication_seconds"]),
        f"{_ms(max(0.0, hidden))} hidden behind compute; "
        f"s = {values['communication_fraction']:.2f}",
    )
    table.add_row(
        "sent by each replica",
        f"{values['bytes_sent'] / 1e6:.2f} MB",
        f"busbw {values['busbw_bytes_per_second'] / 1e9:.2f} GB/s",
    )
    for name, text in (
        ("gradient_norm", "gradient norm"),
        ("loss_scale", "loss scale"),
    ):
        if not math.isnan(values[name]):
            table.add_row(text, f"{values[name]:.4g}", "the latest")
    if values["skipped_steps"]:
        table.add_row("skipped steps", f"{values['skipped_steps']:.0f}", "overflows")
    if len(totals.workers) > 1:
        for rank, own in totals.workers.items():
            table.add_row(
                f"worker {rank} ({hosts[rank]})",
                _ms(own["compute_seconds"]),
                f"own part of a step; waits {_ms(own['wait_seconds'])} for others",
            )
    shown = io.StringIO()
    Console(file=shown, width=100).print(table)
    return f"{shown.getvalue()}{advice}"


_NAMES = {
    "compute": "compute",
    "exposed": "communication, exposed",
    "input": "of compute: until the data was there",
}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _percentiles(values: Mapping[str, float]) -> str:
    shown = [
        f"{name} {_ms(values[f'{name}_seconds'])}" for name in ("p50", "p95", "p99")
    ]
    return ", ".join(shown)
