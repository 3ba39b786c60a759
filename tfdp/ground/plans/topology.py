"""Topology: the replicas of each node, for hierarchical algorithms."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Set
from typing import TypeVar

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Topology:
    """Nodes of a job and the replicas of each node.

    Args:
        nodes: Tuple of tuples of ints, the global ranks of the replicas on each
            node, in the order of node ranks. A replica's position in its node is
            its local rank.

    Raises:
        ValueError: If a node is empty, or the ranks are not each of 0 to N - 1 once.

    Example:

    >>> topology = Topology(((0, 1), (2, 3)))
    >>> topology.num_nodes, topology.num_replicas, topology.replicas_per_node
    (2, 4, 2)
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(map(tuple, self.nodes)))
        ranks = [rank for node in self.nodes for rank in node]
        is_int = all(type(rank) is int for rank in ranks)
        if not (is_int and ranks and all(self.nodes)) or (
            sorted(ranks) != list(range(len(ranks)))
        ):
            raise ValueError(
                "The nodes of a topology must each have replicas and together name "
                "every rank from 0 to N - 1 once; use `topology_of` to find them. "
                f"Received: nodes={self.nodes!r}"
            )

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Restore a topology from the text that `to_json` has written.

        Args:
            text: String, JSON.

        Returns:
            A `Topology`.

        Raises:
            ValueError: If the text does not hold a topology.

        Example:

        >>> Topology.from_json("[[0, 1], [2]]")
        Topology(nodes=((0, 1), (2,)))
        """
        try:
            return cls(json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(
                "A topology in JSON must be a list that holds the list of ranks of "
                f"each node, as `to_json` writes it. Received: text={text!r}"
            ) from error

    def to_json(self) -> str:
        """Write the topology for another worker to read.

        Host names may resolve differently on different machines, so one worker
        determines the topology and the others read it.

        Returns:
            String, JSON, the same for equal topologies.

        Example:

        >>> Topology(((0, 1), (2,))).to_json()
        '[[0, 1], [2]]'
        """
        return json.dumps(self.nodes)

    @property
    def num_replicas(self) -> int:
        """Int, the number of replicas on all nodes."""
        return sum(map(len, self.nodes))

    @property
    def num_nodes(self) -> int:
        """Int, the number of nodes."""
        return len(self.nodes)

    @property
    def is_even(self) -> bool:
        """Bool, whether every node has the same number of replicas."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def replicas_per_node(self) -> int:
        """Int, the number of replicas on the largest node."""
        return max(map(len, self.nodes))

    @property
    def supports_hierarchy(self) -> bool:
        """Bool, whether several nodes have the same number of replicas, above one."""
        return 1 < self.num_nodes < self.num_replicas and self.is_even


def join_overlapping(sets: Iterable[Set[_Item]]) -> list[set[_Item]]:
    """Unite the sets that have an item in common, directly or through others.

    Args:
        sets: Iterable of sets, such as the addresses of each host.

    Returns:
        List of disjoint sets. A set stands at the place of the last one that it unites.

    Example:

    >>> join_overlapping([{0, 1}, {2}, {1, 3}])
    [{2}, {0, 1, 3}]
    """
    joined: list[set[_Item]] = []
    for each in sets:
        apart = [other for other in joined if other.isdisjoint(each)]
        joined = [*apart, set(each).union(*(o for o in joined if o not in apart))]
    return joined
