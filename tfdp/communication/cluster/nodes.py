"""Node discovery: group workers into nodes by host names and addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from tfdp.communication.cluster.address import ip_address
from tfdp.communication.cluster.own_addresses import addresses_of, call_concurrently
from tfdp.ground.plans.topology import Topology, join_overlapping
from tfdp.ground.text import pluralize

# Time limit of all look-ups of host names together, which run concurrently: the
# resolver may wait much longer for a name server that does not answer.
_RESOLVE_SECONDS = 2.0


def topology_of(
    hosts: Sequence[str],
    replicas_per_worker: int,
    *,
    node_size: int | None = None,
    nodes: Sequence[str] | None = None,
    resolve: Callable[[str], Iterable[str]] = addresses_of,
) -> Topology:
    """Find which replicas share a node.

    Replica r of worker w has the global rank `w * replicas_per_worker + r`.
    Workers on one host form one node, and so do workers on hosts that share an
    address; a name that does not resolve within two seconds counts as a host of
    its own. Nodes are ranked by their first replica.

    Args:
        hosts: Sequence of strings, the host of each worker: `Cluster.hosts`.
        replicas_per_worker: Int, number of replicas of each worker.
        node_size: Int or `None`, number of consecutive replicas that form a
            node, whatever their hosts. Defaults to `None`. Like `nodes`, it is an
            option of `CommunicationOptions`, which checks its type.
        nodes: Sequence of strings or `None`, the name of each worker's node,
            whatever its host. Defaults to `None`.
        resolve: Callable, from a host name to its addresses, if there are any.
            Defaults to the system's resolver.

    Returns:
        A `Topology`.

    Raises:
        ValueError: If `node_size` does not divide the number of replicas, or there are
            not as many `nodes` as workers.

    Example:

    >>> topology_of(["127.0.0.1", "127.0.0.1", "10.0.0.2"], 1).nodes
    ((0, 1), (2,))
    >>> topology_of(["a", "b"], 2, node_size=1).nodes
    ((0,), (1,), (2,), (3,))
    >>> topology_of(["a", "b", "c"], 2, nodes=["left", "right", "left"]).nodes
    ((0, 1, 4, 5), (2, 3))
    """
    num_replicas = len(hosts) * replicas_per_worker
    if node_size is not None:
        if num_replicas % node_size:
            raise ValueError(
                f"`node_size` must divide the number of replicas, {num_replicas}; "
                "remove it to derive the nodes from the workers' hosts. "
                f"Received: node_size={node_size}"
            )
        return _group([rank // node_size for rank in range(num_replicas)])
    if nodes is not None and len(nodes) != len(hosts):
        raise ValueError(
            "`nodes` must name the node of each of the "
            f"{pluralize(len(hosts), 'worker')}, in the order of their ranks. "
            f"Received: {pluralize(len(nodes), 'name')}, nodes={nodes!r}"
        )
    names = _machine_numbers(hosts, resolve) if nodes is None else nodes
    return _group([name for name in names for _ in range(replicas_per_worker)])


def _group(labels: Sequence[Hashable]) -> Topology:
    """Return a topology whose nodes are the ranks with equal labels, in rank order.

    Args:
        labels: Sequence of hashables, in the order of global ranks.
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, label in enumerate(labels):
        nodes.setdefault(label, []).append(rank)
    return Topology(tuple(map(tuple, nodes.values())))


def _machine_numbers(
    hosts: Sequence[str], resolve: Callable[[str], Iterable[str]]
) -> list[int]:
    """Return a number for each host, the same for hosts that share an address.

    Args:
        hosts: Sequence of strings, names or addresses.
        resolve: Callable, from a host name to its addresses, as in `topology_of`.
    """
    names = [host.lower() for host in hosts]
    found = _resolve_all(dict.fromkeys(names), resolve).items()
    machines = join_overlapping({name, *addresses} for name, addresses in found)
    numbers = {mark: index for index, marks in enumerate(machines) for mark in marks}
    return [numbers[name] for name in names]


def _resolve_all(
    names: Iterable[str], resolve: Callable[[str], Iterable[str]]
) -> dict[str, list[str]]:
    """Resolve each name once, concurrently; a failure gives an empty list.

    Args:
        names: Iterable of strings, names or addresses of hosts.
        resolve: Callable, from a host name to its addresses, as in `topology_of`.

    Returns:
        Dict from a name to its addresses.
    """
    found = {name: [] if (at := _address(name)) is None else [at] for name in names}
    # A single host needs no look-up: all of its workers are on one node.
    unknown = [name for name, at in found.items() if not at and len(found) > 1]

    def look_up(name: str) -> list[str]:
        """Return the normalized addresses of a host name, which may be none."""
        return [_address(text) or text for text in resolve(name)]

    return found | call_concurrently(look_up, unknown, _RESOLVE_SECONDS)


def _address(text: str) -> str | None:
    """Normalize an IP address, a loopback one to `"loopback"`; `None` for a name."""
    address = ip_address(text)
    if address is None:
        return None
    # All loopback addresses belong to this machine: Debian maps its host name to
    # 127.0.1.1, while `localhost` is 127.0.0.1 or ::1.
    return "loopback" if address.is_loopback else str(address)
