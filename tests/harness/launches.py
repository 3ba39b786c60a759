"""The collectives of a graph, whichever transport carries them."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import typing

import tensorflow as tf
from tensorflow.python.framework import tensor_util

# Kinds by TensorFlow's name of the operation, and by that of `ProcessTransport`.
_OPERATIONS = {
    "CollectiveReduceV2": "all_reduce",
    "CollectiveGatherV2": "all_gather",
    "CollectiveAllToAllV2": "scatter",
    "CollectiveReduceScatterV2": "scatter",
    "CollectiveBcastSendV2": "broadcast",
    "CollectiveBcastRecvV2": "broadcast",
}
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_to_all": "scatter",
    "reduce_scatter": "scatter",
    "broadcast": "broadcast",
}
_CALL = re.compile(
    r"(?:^|/)Collective_([a-z_]+)_([a-z]+\d*)_(\d+)(?:_\d+)?/\w*PartitionedCall[^/]*$"
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One collective of a graph.

    Args:
        kind: `"all_reduce"`, `"all_gather"`, `"broadcast"`, or `"scatter"`: a
            reduce-scatter, or the all-to-all that stands for one.
        dtype: Name of the dtype that travels.
        group_key: Key of its group.
        branch: The branch of a conditional it is in, such as `"then_branch"`, the
            outermost one, or `""`.
    """

    kind: str
    dtype: str
    group_key: int
    branch: str = ""


def launches(function: typing.Any) -> list[Launch]:
    """The collectives of a concrete function, and of those that it calls."""
    graph = function.graph.as_graph_def()
    library = {f.signature.name: f.node_def for f in graph.library.function}
    return list(_of_nodes(graph.node, library, ""))


def _of_nodes(
    nodes: collections.abc.Sequence, library: dict, branch: str
) -> collections.abc.Iterator[Launch]:
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        if node.op in _OPERATIONS:
            source = by_name[re.split(r":", node.input[_key_input(node.op)])[0]]
            key = int(tensor_util.MakeNdarray(source.attr["value"].tensor))
            dtype = tf.as_dtype(node.attr["T"].type).name
            yield Launch(_OPERATIONS[node.op], dtype, key, branch)
        elif found := _CALL.search(node.name):
            yield Launch(_KINDS[found[1]], found[2], int(found[3]), branch)
            continue  # inside there are queues only
        for name, attribute in node.attr.items():
            if attribute.WhichOneof("value") == "func":
                is_branch = name in ("then_branch", "else_branch")
                inner = name if is_branch and not branch else branch
                yield from _of_nodes(library[attribute.func.name], library, inner)


def _key_input(operation: str) -> int:
    return 1 if operation == "CollectiveBcastRecvV2" else 2
