"""`tfdp doctor DIR`: what each worker did last, from the workers' flight records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from tfdp.communication.coordination.flight_record import FlightRecord, file_name
from tfdp.features.monitor import flight_collectives, flight_records
from tfdp.features.monitor.trace import chrome_trace
from tfdp.ground.base.files import read_text
from tfdp.launch.cli.screen import new_console

# A flight record usually has a few hundred kilobytes. A file of more bytes than this is
# not a record, and is not read, since it could fill the memory.
_MAX_BYTES = 64 << 20


def show_records(folders: Sequence[str], trace: Path | None) -> None:
    """Print where each worker was when a job failed: one sentence, and a table.

    Args:
        folders: Sequence of strings, the folders of logs.
        trace: `Path` of the file to write as a trace for Perfetto, or `None`.

    Raises:
        click.UsageError: If an argument is not a folder.
        click.ClickException: If no record can be read, or the trace cannot be written.
    """
    for folder in folders:
        if not Path(folder).is_dir():
            raise click.UsageError(
                "Each argument must be a folder with flight records; options stand "
                f"before the folders. Received: {folder}"
            )
    found, faults = _read(folders)
    for fault in faults:
        click.echo(f"tfdp: {fault}; it is left out", err=True)
    if not found:
        raise click.ClickException(
            "There is no flight record that can be read. Give the folder that the "
            "error of a worker, or `tfdp run`, names. "
            f"Received: {' '.join(folders)}"
        )
    records, left_out = flight_collectives.of_one_attempt(found)
    for rank in left_out:
        click.echo(
            f"tfdp: a record of worker {rank} is of an earlier attempt; it is left out",
            err=True,
        )
    console = new_console()
    console.print(flight_records.explain(records))
    console.print(_table(records))
    if trace is not None:
        _write_trace(records, trace)


def _read(folders: Sequence[str]) -> tuple[list[FlightRecord], list[str]]:
    """Read all records of some folders.

    Args:
        folders: Sequence of strings.

    Returns:
        Tuple of the records, and of a clause for each file that cannot be read.
    """
    found, faults = [], []
    for folder in folders:
        for path in sorted(Path(folder).glob(file_name("*"))):
            try:
                found.append(FlightRecord.from_json(read_text(path, _MAX_BYTES)))
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                faults.append(f"{path} cannot be used: {why}")
    return found, faults


def _table(records: flight_collectives.Records) -> Table:
    """Return a table with each worker's place in the script and last collective."""
    table = Table(*flight_records.COLUMNS)
    for row in flight_records.rows_of(records):
        table.add_row(*row)
    return table


def _write_trace(records: flight_collectives.Records, path: Path) -> None:
    """Write the records to the file `path`, as a trace for Perfetto and Chrome.

    Raises:
        click.ClickException: If the records have no steps and no collectives, or the
            file cannot be written.
    """
    traces = [flight_records.trace_of(record) for record in records.values()]
    if not any(each.slices for each in traces):
        raise click.ClickException(
            "The flight records have no collective and no step, so that no trace is "
            f"written. Received: --trace {path}"
        )
    try:
        path.write_text(json.dumps(chrome_trace(traces)), "utf-8")
    except OSError as error:
        raise click.ClickException(
            f"The trace cannot be written: {error.strerror}. Received: --trace {path}"
        ) from error
