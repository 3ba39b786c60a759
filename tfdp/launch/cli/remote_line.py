"""Lines between `tfdp run --hosts` and its hosts: what each of them is to run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence

import click

import tfdp
from tfdp.communication.cluster import free_ports
from tfdp.ground.text import pluralize
from tfdp.launch.cli.hosts import Host
from tfdp.launch.cli.launch import AutoCount, RunSettings
from tfdp.launch.cli.node_options import NodeOptions, RendezvousAddress
from tfdp.launch.cli.ssh import address_of
from tfdp.launch.rendezvous.secret import new_secret

BEAT = b".\n"
BEAT_SECONDS = 2.0
# A machine that was suspended, or a network that has gone.
SILENT_SECONDS = 20.0
MOST_BYTES = 1 << 20


def banner() -> str:
    """Return the first line of a launcher, which tells its version.

    Example:

    >>> version_of(banner()) == tfdp.__version__
    True
    """
    return json.dumps({"tfdp": tfdp.__version__, "pid": os.getpid()})


def version_of(line: str) -> str | None:
    """Return the version that a line tells if it is a banner, or else `None`.

    Args:
        line: String; a shell's start-up files may print others before it.

    Example:

    >>> version_of("Welcome!") is None
    True
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    version = found.get("tfdp") if isinstance(found, dict) else None
    return version if isinstance(version, str) else None


def order(arguments: Sequence[str], secret: str, grace_seconds: float) -> bytes:
    """Return the line that tells a launcher what to run.

    Args:
        arguments: Sequence of strings, of the command `tfdp`.
        secret: String, the job's.
        grace_seconds: Float, of its workers.
    """
    said = {"arguments": list(arguments), "secret": secret, "grace": grace_seconds}
    return json.dumps(said).encode() + b"\n"


def signal_line(signum: int) -> bytes:
    """Return the line that sends a launcher a signal.

    Args:
        signum: Int.
    """
    return f"signal {int(signum)}\n".encode()


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
    if shutil.which("ssh") is None:
        raise click.UsageError(
            "--hosts and --hostfile need the command ssh, which is not here: install "
            "openssh-client, or run the same line with --nodes on each machine. "
            "Received: no ssh in PATH"
        )
    # Which port is free there is not known; one that is free here is likely to be.
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
    if longest > MOST_BYTES:
        raise click.UsageError(
            "The arguments of the script are too long for --hosts: give it a file of "
            f"them, or a folder. Received: {pluralize(longest, 'byte')}"
        )
    return orders


def _count(host: Host, num_workers: int) -> str:
    if host.num_workers is not None:
        return str(host.num_workers)
    return "auto" if isinstance(num_workers, AutoCount) else str(num_workers)


def _options(settings: RunSettings) -> list[str]:
    """Write the options that all hosts get as they are."""
    given = {
        "--grace": settings.grace,
        "--max-restarts": settings.max_restarts,
        "--devices-per-worker": settings.devices_per_worker,
        "--log-dir": settings.log_dir,
        "--timeout": settings.timeout,
        "--log-format": settings.log_format,
    }
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    words += ["--rebalance"] if settings.rebalance else []
    words += [] if settings.forks else ["--no-fork"]
    return [*words, "-m"] if settings.is_module else words
