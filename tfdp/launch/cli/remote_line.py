"""Lines between `tfdp run --hosts` and the launchers of its hosts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence

import click

import tfdp
from tfdp.communication.cluster import free_ports
from tfdp.communication.connection.secret import new_secret
from tfdp.ground.text import pluralize
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.launch import AutoCount, RunSettings
from tfdp.launch.cli.node_options import NodeOptions, RendezvousAddress
from tfdp.launch.cli.ssh import address_of

# A lost connection is noticed by missing heartbeats, so this line is sent every
# `BEAT_SECONDS`.
BEAT = b".\n"
BEAT_SECONDS = 2.0
# Seconds of silence after which the connection counts as lost. The connection to a
# suspended machine, for example, stays open but is silent.
SILENT_SECONDS = 20.0
# The launcher of a host keeps an incomplete line in memory, so a line to it has at most
# this many bytes.
MAX_BYTES = 1 << 20


def banner() -> str:
    """Return the first line that a host's launcher prints: JSON with its version.

    Example:

    >>> version_of(banner()) == tfdp.__version__
    True
    """
    return json.dumps({"tfdp": tfdp.__version__, "pid": os.getpid()})


def version_of(line: str) -> str | None:
    """Return the version in a banner, or `None` for any other line.

    Args:
        line: String, a line of output. Start-up files of a shell may print others
            before the banner.

    Example:

    >>> version_of("Welcome!") is None
    True
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = fields.get("tfdp") if isinstance(fields, dict) else None
    return version if isinstance(version, str) else None


def order(arguments: Sequence[str], secret: str, grace_seconds: float) -> bytes:
    """Return the line that orders a launcher to run a command.

    Args:
        arguments: Sequence of strings, arguments of the command `tfdp`.
        secret: String, the job's secret.
        grace_seconds: Float, grace period of the workers.
    """
    fields = {"arguments": list(arguments), "secret": secret, "grace": grace_seconds}
    return json.dumps(fields).encode() + b"\n"


def signal_line(signum: int) -> bytes:
    """Return the line that orders a launcher to send itself a signal."""
    return f"signal {int(signum)}\n".encode()


def make_orders(
    hosts: Sequence[Host], where: NodeOptions, settings: RunSettings
) -> list[bytes]:
    """Create the order for the launcher of each host.

    Args:
        hosts: Sequence of `Host`; the first one is node 0.
        where: `NodeOptions` of the command line.
        settings: `RunSettings`, whose number of workers is the default of a host.

    Returns:
        List of bytes, one line for each host. All have the same new secret.

    Raises:
        click.UsageError: If this machine has no ssh, or a line would be too long.
    """
    if shutil.which("ssh") is None:
        raise click.UsageError(
            "--hosts and --hostfile need the command ssh, which is not installed: "
            "install openssh-client, or run the same command with --nodes on each "
            "machine. Received: no ssh in PATH"
        )
    # The free ports of the first host are not known from here, but a port that is free
    # on this machine is likely to be free there.
    place = where.rendezvous or RendezvousAddress(
        address_of(hosts[0]), free_ports(1)[0]
    )
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
    if longest > MAX_BYTES:
        raise click.UsageError(
            "The arguments of the script are too long for --hosts: pass them in a "
            f"file. Received: {pluralize(longest, 'byte')}"
        )
    return orders


def _count(host: Host, num_workers: int) -> str:
    """Return the value of `-n` on the command line of a host's launcher.

    Args:
        host: `Host`, whose own number of workers is used if it is specified.
        num_workers: Int, the value of `-n` for the other hosts; an `AutoCount` becomes
            `"auto"`, so that each host counts its own GPUs or cores.
    """
    if host.num_workers is not None:
        return str(host.num_workers)
    return "auto" if isinstance(num_workers, AutoCount) else str(num_workers)


def _options(settings: RunSettings) -> list[str]:
    """Return the options of `tfdp run` that all hosts receive unchanged, as words."""
    values = {
        "--grace": settings.grace,
        "--max-restarts": settings.max_restarts,
        "--devices-per-worker": settings.devices_per_worker,
        "--log-dir": settings.log_dir,
        "--timeout": settings.timeout,
        "--log-format": settings.log_format,
    }
    words = [f"{name}={value}" for name, value in values.items() if value is not None]
    words += ["--rebalance"] if settings.rebalance else []
    words += [] if settings.forks else ["--no-fork"]
    return [*words, "-m"] if settings.is_module else words
