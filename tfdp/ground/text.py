"""Texts for the user: lines on stderr, and numbers with nouns."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# A text lists at most this many workers by rank, so that it stays short in a large job.
_MAX_RANKS = 8


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with a noun in the singular or the plural.

    Args:
        number: Int.
        noun: String, the noun in the singular.
        plural: String, the noun in the plural, or `None`. Defaults to `None`: the
            singular and an s.

    Returns:
        String.

    Example:

    >>> pluralize(1, "worker"), pluralize(0, "worker"), pluralize(1024, "replica")
    ('1 worker', '0 workers', '1,024 replicas')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def list_ranks(ranks: Sequence[int], noun: str = "worker") -> str:
    """Return a text that names workers by rank, at most eight of them.

    Args:
        ranks: Sequence of ints, at least one.
        noun: String, the noun in the singular. Defaults to `"worker"`.

    Returns:
        String.

    Example:

    >>> list_ranks([3]), list_ranks([0, 1, 2]), list_ranks(range(12), "rank")
    ('worker 3', 'workers 0, 1 and 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more')
    """
    names = [str(rank) for rank in ranks[:_MAX_RANKS]]
    if len(ranks) > _MAX_RANKS:
        names.append(f"{len(ranks) - _MAX_RANKS} more")
    *first, last = names
    return f"{noun}s {', '.join(first)} and {last}" if first else f"{noun} {last}"


def say(text: object) -> None:
    """Print a line with the prefix `tfdp: ` on stderr, and flush it.

    Args:
        text: Object, whose text begins with a small letter or a name.
    """
    print(f"tfdp: {text}", file=sys.stderr, flush=True)
