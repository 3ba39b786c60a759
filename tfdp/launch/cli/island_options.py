"""Options of `tfdp run` for islands, and the check of their combination.

An island is a job of one worker. Islands exchange parameters in the outer steps of
DiLoCo only, through the hub: a server that does not train itself.
"""

from __future__ import annotations

import dataclasses

import click

from tfdp.communication.cluster.address import split_address
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.node_options import NodeOptions


@dataclasses.dataclass(frozen=True)
class IslandOptions:
    """Values of the options of `tfdp run` for islands.

    Args:
        is_used: Bool, whether each worker is an island.
        hub: String, address `"host:port"` of the hub, or `None` for a hub of this
            machine's islands only.
        total: Int, number of islands on all machines, or `None` for those of this
            machine only.
        first: Int, index of the first island on this machine.
    """

    is_used: bool
    hub: str | None
    total: int | None
    first: int

    def check(self, num_workers: int, where: NodeOptions, others: list[str]) -> None:
        """Check the combination of options.

        Args:
            num_workers: Int, number of islands on this machine.
            where: `NodeOptions` of the same command line.
            others: List of strings, used options that do not work with islands.

        Raises:
            click.UsageError: If options cannot be combined.
        """
        if not self.is_used:
            given = {
                "--hub": self.hub,
                "--num-islands": self.total,
                "--first-island": self.first,
            }
            for name in filter(given.get, given):
                raise click.UsageError(f"{name} requires --islands. Add it.")
            return
        if not where.is_one_machine:
            others = [*others, "--hosts, --nodes and --rendezvous"]
        if others:
            raise click.UsageError(
                f"--islands cannot be combined with {others[0]}: remove it. On several "
                "machines, run the same command on each, with --hub"
            )
        last = self.first + num_workers
        if last > (self.total or num_workers):
            raise click.UsageError(
                "--num-islands must be at least --first-island plus -n. Received: "
                f"--num-islands {self.total or num_workers}, --first-island "
                f"{self.first}, -n {num_workers}"
            )
        if self.total not in (None, num_workers) and self.hub is None:
            raise click.UsageError(
                "Islands of several machines need --hub HOST:PORT, a port on the "
                "machine with --first-island 0"
            )


def _address(text: str) -> str:
    """Return the value of `--hub` after a check of its form."""
    try:
        split_address(text)
    except ValueError:
        raise ValueError("it must be HOST:PORT") from None
    return text


# Decorator that adds an option for each field of `IslandOptions`.
island_options = types.with_options(
    types.option(
        "--islands",
        "Each worker is a separate job, an island, and synchronizes with the others "
        "in the outer steps of DiLoCo only: a failure of one does not stop the others.",
        name="is_used",
    ),
    types.option(
        "--hub HOST:PORT",
        "Address at which islands of several machines synchronize; the machine with "
        "the first one listens there.",
        types.Checked("address", _address),
    ),
    types.count_option(
        "--num-islands T", "Islands of all machines. Default: -n.", name="total"
    ),
    types.option(
        "--first-island I",
        "Index of this machine's first island.",
        types.NUMBER_OF_TIMES,
        name="first",
        default=0,
    ),
)
