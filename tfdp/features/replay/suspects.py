"""Which replicas have computed wrongly, by the digests of one or two rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class ReplayDigests(NamedTuple):
    """Digests of one run of a replayed step, in which two replicas compute each row.

    Args:
        computed: Array `[2, num_replicas, num_digests]` of ints: what each replica
            computed from its own rows, and from those of the next replica.
        received: Array `[num_replicas]` of ints, of the sums of gradients that each
            replica received; or `[0]` if nothing was summed.
    """

    computed: np.ndarray
    received: np.ndarray

    @property
    def pairs(self) -> tuple[int, list[set[int]]]:
        """Position of the first digest that differs, and pairs of ranks that differ.

        A pair is a set of two ranks: of a replica, and of the previous one, which has
        computed the same rows as its stand-in. Without a difference, this is `(0, [])`.
        """
        own, others = self.computed[0], np.roll(self.computed[1], 1, axis=0)
        differs = own != others
        if not differs.any():
            return 0, []
        # Only the first digest that differs is evidence: after it, even a correct
        # replica may compute other digests, from a wrong part that it has received.
        first = int(np.argmax(differs.any(axis=0)))
        size = len(own)
        ranks = np.flatnonzero(differs[:, first]).tolist()
        return first, [{rank, (rank - 1) % size} for rank in ranks]

    @property
    def is_right(self) -> bool:
        """Bool, whether all replicas have computed and received the same."""
        return not self.pairs[1] and len(set(self.received.tolist())) < 2


def suspects(rounds: Sequence[ReplayDigests]) -> list[int]:
    """Return the ranks of the replicas that may have computed wrongly.

    Candidates are the replicas in all pairs that differ, or else in any pair; without
    pairs, those that received another sum than the majority. Of several candidates,
    only those whose digests differ between the rounds are suspects, if there are any.

    Args:
        rounds: Sequence of `ReplayDigests`, of the step and of its repetition. At
            least one has a difference.

    Example:

    >>> right = ReplayDigests(np.array([[[1], [2]], [[2], [1]]]), np.array([7, 7]))
    >>> wrong = ReplayDigests(np.array([[[1], [3]], [[2], [1]]]), np.array([]))
    >>> suspects([wrong, right]), suspects([wrong, wrong])
    ([1], [0, 1])
    """
    wrong = [round_ for round_ in rounds if not round_.is_right]
    first, pairs = wrong[-1].pairs
    if pairs:
        found = set.intersection(*pairs) or set.union(*pairs)
        # Each replica has two digests: of its own rows, and of those of the next
        # replica, whose stand-in it is. If one of the two changes between the rounds,
        # the replica was wrong in one of the rounds.
        digests = [round_.computed[..., first].T for round_ in rounds]
    else:
        values, counts = np.unique(wrong[-1].received, return_counts=True)
        usual = values[counts.argmax()] if 2 * counts.max() > counts.sum() else None
        ranks = np.flatnonzero(wrong[-1].received != usual).tolist()
        found = set(ranks)
        digests = [round_.received for round_ in rounds]
    are_comparable = len({digest.shape for digest in digests}) == 1
    if len(found) > 1 and are_comparable:
        changed = {r for r in found if np.any(digests[0][r] != digests[-1][r])}
        found = changed or found
    return sorted(found)
