"""Texts for the user: lines on stderr, and numbers with nouns."""

from __future__ import annotations

import sys


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


def say(text: object) -> None:
    """Print a line with the prefix `tfdp: ` on stderr, and flush it.

    Args:
        text: Object, whose text begins with a small letter or a name.
    """
    print(f"tfdp: {text}", file=sys.stderr, flush=True)
