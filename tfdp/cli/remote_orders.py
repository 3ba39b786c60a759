"""Orders for the launchers of `tfdp run --hosts`: what each of them runs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from tfdp.cli.hosts import Host
from tfdp.cli.node_options import NodeOptions, Place
from tfdp.cli.remote_line import MOST_BYTES, order
from tfdp.cli.run_settings import AutoCount, RunSettings
from tfdp.cli.ssh import address_of, has_ssh
from tfdp.cluster import counted, free_ports
from tfdp.rendezvous.secret import new_secret


def make_orders(
    hosts: Sequence[Host], where: NodeOptions, settings: RunSettings
) -> list[bytes]:
    """Make the line that tells the launcher of each host what to run.

    Args:
        hosts: Sequence of `Host`; the first one is node 0.
        where: `NodeOptions`.
        settings: `RunSettings`; its number of workers is for hosts without their own.

    Returns:
        List of bytes. The secret in them is new, and all have the same.

    Raises:
        click.UsageError: If this machine has no ssh, or a line would be too long.
    """
    if not has_ssh():
        raise click.UsageError(
            "--hosts and --hostfile need the command ssh, which is not here: install "
            "openssh-client, or run the same line with --nodes on each machine. "
            "Received: no ssh in PATH"
        )
    # Which port is free there is not known; one that is free here is likely to be.
    place = where.rendezvous or Place(address_of(hosts[0]), free_ports(1)[0])
    secret = new_secret()
    orders = [
        order(
            [
                "run",
                *("--nodes", str(len(hosts)), "--node-rank", str(rank)),
                *("--rendezvous", str(place)),
                *("--join-timeout", f"{where.join_seconds:g}"),
                *("-n", _count(host, settings.num_workers)),
                *_options(settings),
                settings.script,
                *settings.args,
            ],
            secret,
            settings.grace,
        )
        for rank, host in enumerate(hosts)
    ]
    longest = max(map(len, orders))
    if longest > MOST_BYTES:
        raise click.UsageError(
            "The arguments of the script are too long for --hosts: give it a file of "
            f"them, or a folder. Received: {counted(longest, 'byte')}"
        )
    return orders


def _count(host: Host, num_workers: int) -> str:
    if host.num_workers is not None:
        return str(host.num_workers)
    return "auto" if isinstance(num_workers, AutoCount) else str(num_workers)


def _options(settings: RunSettings) -> list[str]:
    """Write the options that all hosts get as they are."""
    words = ["--grace", f"{settings.grace:g}"]
    words += ["--max-restarts", str(settings.max_restarts)]
    if settings.devices_per_worker is not None:
        words += ["--devices-per-worker", str(settings.devices_per_worker)]
    if settings.log_dir is not None:
        words += ["--log-dir", settings.log_dir]
    if settings.timeout is not None:
        words += ["--timeout", f"{settings.timeout:g}"]
    if settings.log_format != "text":
        words += ["--log-format", settings.log_format]
    words += ["--rebalance"] if settings.rebalance else []
    words += [] if settings.forks else ["--no-fork"]
    return [*words, "-m"] if settings.is_module else words
