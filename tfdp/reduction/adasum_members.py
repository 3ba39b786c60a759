"""Members of Adasum: whose gradients it combines, and what is a mean to it."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdp.collectives import ProcessGroup, all_reduce, timing


@dataclasses.dataclass(frozen=True)
class AdasumMembers:
    """Replicas, or nodes whose replicas are summed, that Adasum combines.

    Args:
        group: `ProcessGroup` of all replicas.
        of_nodes: Bool, whether its nodes are the members.
    """

    group: ProcessGroup
    of_nodes: bool

    @property
    def count(self) -> int:
        """Int, how many gradients are combined."""
        return len(self.group.nodes) if self.of_nodes else self.group.size

    def share(self, own: tf.Tensor, replica: int) -> tf.Tensor:
        """Sum the shares of the batch of those whose mean is one to Adasum.

        Args:
            own: Scalar tensor, the part of all rows that this replica has.
            replica: Int, index of the calling replica among the local ones.

        Returns:
            Scalar tensor, the part that the replica's member has.
        """
        if not self.of_nodes:
            return own
        node = self.group.split(self.group.nodes)[replica]
        assert node is not None
        with timing.labelled("weights"), tf.device(self.group.devices[replica]):
            return all_reduce(own[tf.newaxis], node, replica)[0]
