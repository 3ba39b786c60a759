"""`tfdp bench`: what communication and training cost here, measured side by side."""

from __future__ import annotations

import click

from tfdp.cli.bench_buckets import buckets
from tfdp.cli.bench_collectives import collectives
from tfdp.cli.bench_training import compare, train


@click.group(
    commands=[collectives, train, compare, buckets],
    no_args_is_help=False,
    invoke_without_command=True,
)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measures collectives and training, as ratios of sides that take turns.

    Each benchmark prints a table, writes JSON and a plot, and names the machine
    and the versions. Run it on an idle machine.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
