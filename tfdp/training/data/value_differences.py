"""Comparison of the values of arrays that workers hold, by fingerprints.

Workers send fingerprints in messages that they exchange anyway. Only if fingerprints
differ does a second message describe the values, which distinguishes rounding from
other values, and another order from other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp.communication.coordination.facts import SharedFact
from tfdp.communication.coordination.worker_group import WorkerGroup
from tfdp.ground.text import list_ranks
from tfdp.training.data.fingerprints import ArrayValues

# Workers may have computed floats, and 8-bit integers such as images, with different
# rounding. Values of a block count as equal up to this multiple of the block's norm.
_ROUNDING = 1e-3
# An error message stays readable if it lists at most this many groups of workers, and
# this many arrays of each group.
_MAX_GROUPS = 3
_MAX_NAMES = 8
_SAME_ROWS = "with the same rows in another order"
_OTHER_VALUES = "with other values"
# The first sentence of the error, unless a caller compares other values than those of a
# dataset and passes its own. A remedy follows.
_DATA_DIFFER = (
    "Workers have data of different values, so that some rows would be read twice and "
    "others never."
)


def values_fact(
    worker_group: WorkerGroup,
    topic: str,
    values: ArrayValues,
    problem: str = _DATA_DIFFER,
) -> SharedFact:
    """Return array values as a `SharedFact`: equal on all workers, up to rounding.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, what is compared, for messages.
        values: `ArrayValues` of this worker.
        problem: String, beginning of the error. Defaults to one about datasets.
    """

    def explain(fingerprints: dict[int, dict]) -> str:
        """Return the error if values differ by more than rounding, or else `""`.

        All workers call it, since they may exchange more details of their arrays.

        Args:
            fingerprints: Dict from the rank of each worker to the result of
                `ArrayValues.fingerprints` there.
        """
        by_worker = list(fingerprints.values())
        difference = find_difference(worker_group, topic, by_worker, values)
        return difference and (
            f"{problem} Draw, shuffle, split and list data alike on every worker, by "
            "one seed and in sorted order, or give each a `tf.data.Dataset` of its own "
            f"with `AutoShardPolicy.OFF`. Received: {difference}"
        )

    return SharedFact("values", values.fingerprints(), explain)


def find_difference(
    worker_group: WorkerGroup,
    topic: str,
    fingerprints: Sequence[dict[str, Any]],
    values: ArrayValues,
) -> str:
    """Describe the arrays that differ between workers by more than rounding.

    All workers call it with the same fingerprints, since they may exchange more details
    of their arrays.

    Args:
        worker_group: `WorkerGroup` between the workers.
        topic: String, what is compared, for messages.
        fingerprints: Sequence of dicts, the fingerprints of each worker's arrays.
        values: `ArrayValues` of this worker.

    Returns:
        String, or an empty one if the arrays differ at most by rounding.
    """
    names = [
        name
        for name in fingerprints[0]
        if _are_comparable([of_worker.get(name) for of_worker in fingerprints])
        and any(of_worker[name] != fingerprints[0][name] for of_worker in fingerprints)
    ]
    if not names:
        return ""
    # Workers with equal values would send the same description, so only the first
    # worker of each such group describes its values.
    ranks: dict[str, list[int]] = {}
    for rank, of_worker in enumerate(fingerprints):
        ranks.setdefault(str([of_worker[name] for name in names]), []).append(rank)
    first_ranks = [of_group[0] for of_group in ranks.values()]
    describes = worker_group.rank in first_ranks
    own = {name: values.describe(name) for name in names} if describes else {}
    descriptions = worker_group.all_gather(f"{topic}: values", own)
    first, *others = [descriptions[rank] for rank in first_ranks]
    groups = list(ranks.values())[1:]
    sentences = [
        f"{difference} on {list_ranks(of_group)}"
        for of_group, other in zip(groups, others, strict=True)
        if (difference := _describe_pair(first, other))
    ]
    if not sentences:
        return ""
    more = ["others on more workers"] if len(sentences) > _MAX_GROUPS else []
    return f"{'; '.join([*sentences[:_MAX_GROUPS], *more])} than on worker 0"


def _are_comparable(fingerprints: list[Any]) -> bool:
    """Return whether all workers have read the same rows of an array.

    They have not if the lengths differ, which is reported elsewhere, or if the array is
    in memory on one worker, and in a file on another.

    Args:
        fingerprints: List of one array's fingerprint on each worker.
    """
    if any(each is None or each[1] is None for each in fingerprints):
        return False
    return all(each[0] == fingerprints[0][0] for each in fingerprints)


def _is_different(first: dict | None, other: dict | None) -> bool:
    """Return whether two descriptions of an array differ by more than rounding.

    `ArrayValues.describe` returned them on two workers. The result is true if one is
    `None`, and false for lists of paths without a common name.
    """
    if first is None or other is None:
        # A missing description counts as a difference, because values are described
        # only if their fingerprints differ.
        return True
    if first["paths"] and other["paths"] and first["rows"] and other["rows"]:
        # Lists of paths without a common name may be copies of one data set under other
        # names, so they do not count as different. Lists that share some names do.
        return bool(set(first["rows"][1]) & set(other["rows"][1]))
    if len(first["parts"]) != len(other["parts"]):
        return True
    pairs = zip(first["parts"], other["parts"], strict=True)
    return any(_parts_differ(*pair) for pair in pairs)


def _parts_differ(first: Any, other: Any) -> bool:
    """Return whether an array part differs between two workers by more than rounding.

    The arguments are its descriptions: lists of blocks, or digests, see
    `ArrayPart.describe`.
    """
    if isinstance(first, str) or isinstance(other, str):
        return first != other
    if len(first) != len(other):
        return True
    # A block has three numbers: a projection, the norm, and how many values are not
    # finite. Rounding may change the first two, in proportion to the norm.
    blocks, others = np.array(first), np.array(other)
    most = _ROUNDING * np.maximum(blocks[:, 1], others[:, 1])
    differences = np.abs(blocks - others)
    is_rounding = (differences[:, :2] <= most[:, np.newaxis]).all()
    return not is_rounding or bool(differences[:, 2].any())


def _describe_pair(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Describe how arrays of two workers differ, such as 'x with other values'.

    Each dict has the results of `ArrayValues.describe` on one worker, by array name.
    The text is empty if none differs by more than rounding.
    """
    names = [name for name in first if _is_different(first[name], other[name])]
    if not names:
        return ""
    same_rows = all(_have_same_rows(first[name], other[name]) for name in names)
    if len(names) > _MAX_NAMES:
        names[_MAX_NAMES:] = [f"{len(names) - _MAX_NAMES} more"]
    return f"{', '.join(names)} {_SAME_ROWS if same_rows else _OTHER_VALUES}"


def _have_same_rows(first: dict | None, other: dict | None) -> bool:
    """Return whether two described arrays have the same rows, in any order.

    The result is `False` if the rows of one array are not described.
    """
    if first is None or other is None or not first["rows"] or not other["rows"]:
        return False
    return first["rows"][0] == other["rows"][0]
