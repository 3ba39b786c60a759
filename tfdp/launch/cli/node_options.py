"""Options of `tfdp run` for several machines, and the check of their combination."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

import click

from tfdp.communication.cluster.address import join_address
from tfdp.launch.cli import parameter_types as types
from tfdp.launch.cli.errors import usage_errors
from tfdp.launch.cli.hosts import Host, parse_hosts, read_hostfile
from tfdp.launch.rendezvous.address import is_link_local

# All machines must use the same port of the rendezvous, so it has a default: that of
# torchrun's rendezvous.
DEFAULT_PORT = 29400
# Machines may start minutes apart, so by default they wait for each other this many
# seconds.
_JOIN_SECONDS = 300.0
# Matches `HOST` or `HOST:PORT`. An IPv6 address must be in brackets, since it contains
# colons itself.
_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:/@\[\]]+)(?::([0-9]{1,5}))?")


class RendezvousAddress(NamedTuple):
    """Address of a job's rendezvous, at which its nodes find each other.

    Args:
        host: String, name or IP address of node 0.
        port: Int, port at which node 0 listens.
    """

    host: str
    port: int

    def __str__(self) -> str:
        """Return "host:port", with an IPv6 address in brackets."""
        return join_address(*self)


class NodeRange(NamedTuple):
    """Number of machines of a job, or the range of it.

    Args:
        most: Int, number of machines, or the largest number if `least` is set.
        least: Int, number of machines with which the job starts and continues, or
            `None` if it needs all.
    """

    most: int
    least: int | None = None

    def __str__(self) -> str:
        """Return the value of `--nodes`, such as "4" or "1:4"."""
        return f"{self.most}" if self.least is None else f"{self.least}:{self.most}"


@dataclasses.dataclass(frozen=True)
class NodeOptions:
    """Values of the options of `tfdp run` for several machines, or `None` if not given.

    Args:
        nodes: `NodeRange`, number of machines that run the same command line.
        node_rank: Int, rank of this machine.
        rendezvous: `RendezvousAddress` of node 0.
        join_timeout: Float, seconds to wait for machines that have not joined.
        hosts: Tuple of `Host` to start by ssh.
        hostfile: String, path of a file that names the hosts.
        remote_python: String, path of Python on the hosts.
    """

    nodes: NodeRange | None
    node_rank: int | None
    rendezvous: RendezvousAddress | None
    join_timeout: float | None
    hosts: tuple[Host, ...] | None
    hostfile: str | None
    remote_python: str | None

    def __post_init__(self) -> None:
        if self.hostfile is None:
            return
        if self.hosts is not None:
            raise click.UsageError(
                "Give --hosts or --hostfile, not both. Received: both"
            )
        received = f"Received: --hostfile {self.hostfile}"
        with usage_errors(text_of=lambda error: f"--hostfile: {error}. {received}"):
            object.__setattr__(self, "hosts", read_hostfile(self.hostfile))

    @property
    def join_seconds(self) -> float:
        """Float, seconds that nodes wait for each other, by option or default."""
        return _JOIN_SECONDS if self.join_timeout is None else self.join_timeout

    @property
    def is_one_machine(self) -> bool:
        """Bool, whether this machine runs all workers."""
        return self.hosts is None and self.rendezvous is None

    @property
    def is_elastic(self) -> bool:
        """Bool, whether the job continues without lost machines, and admits others."""
        return self.nodes is not None and self.nodes.least is not None

    def check(self, min_workers: int | None) -> None:
        """Check the combination of options.

        Args:
            min_workers: Int, value of the option `--min-workers`, or `None`.

        Raises:
            click.UsageError: If options cannot be combined.
        """
        if self.hosts is None:
            self._check_nodes()
        else:
            self._refuse(
                "{} is for a command that is run on each machine; remove it, since "
                "--hosts and --hostfile name all machines",
                *("nodes", "node_rank"),
            )
        if min_workers is not None and not self.is_one_machine:
            raise click.UsageError(
                "--min-workers needs a job on one machine; on several machines, all "
                f"workers restart together. Received: --min-workers {min_workers}"
            )

    def _check_nodes(self) -> None:
        """Raise a usage error for options that conflict in a job without `--hosts`.

        They are `--remote-python`; options of nodes without `--nodes`; several nodes
        without `--rendezvous`; and a `--node-rank` that is not below `--nodes`, or not
        0 in an elastic job.
        """
        nodes, rank = self.nodes, self.node_rank
        if self.remote_python is not None:
            raise click.UsageError(
                "--remote-python needs --hosts or --hostfile. "
                f"Received: --remote-python {self.remote_python}"
            )
        if nodes is None:
            self._refuse(
                "{} needs --nodes, the number of machines",
                *("node_rank", "rendezvous", "join_timeout"),
            )
        elif self.rendezvous is None and (nodes.most > 1 or self.is_elastic):
            raise click.UsageError(
                "Several machines need --rendezvous HOST:PORT, the address of the "
                f"first one by which the others reach it. Received: --nodes {nodes}"
            )
        elif rank is not None and rank >= (1 if self.is_elastic else nodes.most):
            is_one = self.is_elastic or nodes.most == 1
            ranks = "0" if is_one else f"from 0 to {nodes.most - 1}"
            raise click.UsageError(
                f"--node-rank must be {ranks}. "
                f"Received: --node-rank {rank}, --nodes {nodes}"
            )

    def _refuse(self, sentence: str, *names: str) -> None:
        """Raise a usage error about the first of the named options, if any was given.

        Args:
            sentence: String, the error with `{}` in place of the option.
            *names: Strings, names of fields of this class.
        """
        for name in names:
            if (value := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')}"
                raise click.UsageError(
                    f"{sentence.format(option)}. Received: {option} {value}"
                )


def _parse_nodes(text: str) -> NodeRange:
    """Parse the value of `--nodes`, `N` or `MIN:MAX`, or raise `ValueError`."""
    least, colon, most = text.rpartition(":")
    try:
        nodes = NodeRange(int(most), int(least) if colon else None)
    except ValueError:
        nodes = NodeRange(0)
    if not 1 <= (nodes.least or nodes.most) <= nodes.most or nodes.least == 0:
        raise ValueError(
            "it must be a number of machines, or MIN:MAX such as 1:4, of at least 1"
        )
    return nodes


def parse_rendezvous(text: str) -> RendezvousAddress:
    """Parse the value of `--rendezvous`; raise `ValueError` if it is malformed."""
    match = _PLACE.fullmatch(text)
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ValueError(
            "it must be HOST:PORT, the address of node 0 by which the other machines "
            "reach it"
        )
    host = match[1].strip("[]")
    if is_link_local(host):
        raise ValueError(
            "an address that begins with fe80 means another machine on each network "
            "interface; give another one of node 0, or its name"
        )
    return RendezvousAddress(host, port)


# The names of these options are the fields of `NodeOptions`, which `pop_fields` creates
# from their values.
node_options = types.with_options(
    types.option(
        "--nodes N|MIN:MAX",
        "Number of machines; the same command is run on each of them. With MIN:MAX the "
        "job starts with MIN, continues while as many are left, and takes in others.",
        types.Checked("range", _parse_nodes),
    ),
    types.option(
        "--node-rank K",
        "Rank of this machine. Default: the machine of --rendezvous is 0, the "
        "others are ranked in the order in which they join.",
        types.NUMBER_OF_TIMES,
    ),
    types.option(
        "--rendezvous HOST:PORT",
        f"Address of node 0, to which all connect. Default port: {DEFAULT_PORT}.",
        types.Checked("place", parse_rendezvous),
    ),
    types.seconds_option(
        "--join-timeout S",
        "Seconds to wait for machines that have not joined. Default: 300.",
    ),
    types.option(
        "--hosts HOST:N,...",
        "Machines that are started from here by ssh, with N workers each.",
        types.Checked("hosts", parse_hosts),
    ),
    types.file_option("--hostfile FILE", "A file with one HOST:N in each line."),
    types.option(
        "--remote-python PATH",
        "Python of the machines of --hosts. Default: the path of this one.",
    ),
)
