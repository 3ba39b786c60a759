"""Hello of a node: what it says of itself, and what has to be the same on all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdp.communication.cluster.tf_config import shorten
from tfdp.ground.text import pluralize
from tfdp.launch.rendezvous.failure import MalformedMessage

_MOST_WORKERS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a node says of itself.

    Args:
        version: String, of tfdp.
        python: String, version of Python such as `"3.11"`.
        nodes: Int, how many nodes its command asks for.
        num_workers: Int, that it will start.
        program: String, name of the script or module.
        rebalance: Bool, whether rows follow the workers' speed.
        host: String, the name of its machine.
        node_rank: Int, the rank that it wants, or `None` for the next. Defaults to
            `None`.
        grace_seconds: Float, that its workers have to end when they are asked to.
            Defaults to `5.0`.
    """

    version: str
    python: str
    nodes: int
    num_workers: int
    program: str
    rebalance: bool
    host: str
    node_rank: int | None = None
    grace_seconds: float = 5.0

    def to_message(self) -> dict[str, Any]:
        """Return the message that carries it."""
        return {"type": "hello", **dataclasses.asdict(self)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Hello:
        """Read the message of another node.

        Args:
            message: Mapping, which may hold anything.

        Returns:
            `Hello`.

        Raises:
            MalformedMessage: If a field is missing or has another type.
        """
        if message.get("type") != "hello":
            raise MalformedMessage
        fields = {f.name: message.get(f.name) for f in dataclasses.fields(cls)}
        texts = [fields[name] for name in ("version", "python", "program", "host")]
        numbers = [fields[name] for name in ("nodes", "num_workers")]
        rank, grace = fields["node_rank"], fields["grace_seconds"]
        is_right = (
            all(isinstance(text, str) for text in texts)
            and all(_is_number(each, 1) for each in numbers)
            and isinstance(fields["rebalance"], bool)
            and (rank is None or _is_number(rank, 0))
            and isinstance(grace, (int, float))
            and grace >= 0
        )
        if not is_right:
            raise MalformedMessage
        return cls(**fields)  # type: ignore[arg-type]

    def difference(self, first: Hello) -> str | None:
        """Say what is not as on node 0 but has to be.

        Args:
            first: `Hello` of node 0.

        Returns:
            String, one sentence, or `None`.

        Example:

        >>> one = Hello("1.0", "3.11", 2, 4, "train.py", False, "a")
        >>> one.difference(one) is None
        True
        >>> dataclasses.replace(one, nodes=3).difference(one)
        'Node 0 was started with --nodes 2, a with --nodes 3. Give both the same.'
        """
        host = shorten(self.host)
        if self.version != first.version:
            return (
                f"Node 0 has tfdp {first.version}, {host} has tfdp "
                f"{shorten(self.version)}. Install the same version on all machines."
            )
        if self.python != first.python:
            return (
                f"Node 0 has Python {first.python}, {host} has Python "
                f"{shorten(self.python)}. Use the same version on all machines."
            )
        if self.nodes != first.nodes:
            return (
                f"Node 0 was started with --nodes {first.nodes}, {host} with --nodes "
                f"{self.nodes}. Give both the same."
            )
        if self.program != first.program:
            return (
                f"Node 0 runs {first.program}, {host} runs {shorten(self.program)}. "
                "Give all machines the same script."
            )
        if self.rebalance != first.rebalance:
            who = "Node 0" if first.rebalance else host
            return f"{who} alone has --rebalance. Give it to all machines, or to none."
        return None

    def rank_out_of_range(self) -> str | None:
        """Say that the rank that the node wants is none, or return `None`."""
        if self.node_rank is None or 0 <= self.node_rank < self.nodes:
            return None
        return (
            f"--node-rank must be from 0 to {self.nodes - 1}, for there "
            f"{'is' if self.nodes == 1 else 'are'} {pluralize(self.nodes, 'node')}. "
            f"Received: --node-rank {self.node_rank}"
        )


def _is_number(value: object, least: int) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and value in range(least, _MOST_WORKERS + 1)
