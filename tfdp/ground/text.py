"""Numbers with their nouns, for messages."""

from __future__ import annotations


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and what is counted, in the singular or the plural.

    Args:
        number: Int.
        noun: String, the singular.
        plural: String or `None`. Defaults to `None`: the singular and an s.

    Returns:
        String.

    Example:

    >>> pluralize(1, "worker"), pluralize(0, "worker"), pluralize(1024, "replica")
    ('1 worker', '0 workers', '1,024 replicas')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
